"""How much memory this process holds, now and at its peak, as Linux counts it.

Does not see memory of a GPU. Mapped files count while their pages are in memory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from vllm_delta_sync.errors import ConfigError

_PROCESS = Path("/proc/self")


def held() -> int:
    """Bytes now, once what was freed is given back."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: else freed memory would serve unseen
    if give_back is not None:
        give_back(0)
    return _field("VmRSS")


def peak() -> int:
    """Bytes, at most since `reset_peak`. What getrusage tells would count the parent of this process."""
    return _field("VmHWM")


def reset_peak() -> int:
    """Let the peak begin anew, and return what is held now. Raises ConfigError where the system does not tell."""
    now = held()
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError as error:
        raise ConfigError(f"measuring memory needs Linux and a writable /proc/self/clear_refs: {error}") from error
    return now


def _field(name: str) -> int:
    lines = dict(line.split(":") for line in (_PROCESS / "status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10
