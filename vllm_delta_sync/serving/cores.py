"""Which CPU cores compute tokens, and where background threads go instead.

vLLM's CPU backend starts every rank bound to its cores, and threads inherit that; the engine's process is not bound. On
a GPU server nothing is: then no core is spare, and every thread may run anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_THREADS = Path("/proc/self/task")


def of_this_process() -> frozenset[int]:
    """The cores that any thread of this process may run on; empty where the system does not tell."""
    cores: frozenset[int] = frozenset()
    if hasattr(os, "sched_getaffinity") and _THREADS.is_dir():
        for thread in _THREADS.iterdir():
            try:
                cores |= os.sched_getaffinity(int(thread.name))
            except OSError:  # it has ended
                continue
    return cores


def move_to(cores: Iterable[int]) -> None:
    """Let the calling thread run on these cores only. None, or cores that this machine has not got: it stays."""
    wanted = set(cores)
    if wanted and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, wanted)
        except OSError:
            return
