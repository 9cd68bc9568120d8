"""Locks on files (flock) that processes of one node hold against each other, and that the kernel drops when one dies.

Does not remove the files that are locked. For local file systems: on others the locks may not mean anything.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync.errors import CacheError

# What is opened may have been put there by anyone: neither follow a link nor wait for the other end of a pipe.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # to lock exclusively: NFS wants no less for that
CREATE = WRITE | os.O_CREAT
_SHORTEST_S, _LONGEST_S = 0.002, 0.1


def take(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file unless someone else holds a lock against that; the lock lives as long as the handle's file.

    A handle to be locked exclusively must be open for writing.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_if_free(path: Path) -> bool:
    """Remove a file on which nobody holds a lock; returns whether it is gone."""
    try:
        handle = os.open(path, WRITE)
    except FileNotFoundError:
        return True
    try:
        if not take(handle):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(handle)


@contextmanager
def alone(
    path: Path,
    patience_s: float,
    progress: Callable[[], object] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the lock file `path`, made when missing, exclusively.

    Args:
        patience_s: seconds to wait for whoever holds it before raising CacheError; they begin anew as long as
            `progress` gives another value than before.
    """
    handle = os.open(path, CREATE, 0o600)
    try:
        waited, pause, seen = 0.0, _SHORTEST_S, progress()
        while not take(handle):
            if waited >= patience_s:
                now = progress()
                if now == seen:
                    raise CacheError(
                        f"{path}: another process holds this lock, and nothing happened for {waited:.0f} s"
                    )
                waited, seen = 0.0, now
            sleep(pause)
            waited, pause = waited + pause, min(2 * pause, _LONGEST_S)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # not by closing alone: a child forked meanwhile has the file open too
    finally:
        os.close(handle)
