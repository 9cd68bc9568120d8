"""A directory on this node in which processes share what they fetched: one of them downloads, the others read the file.

Does not fetch, and trusts no file: whoever reads an entry verifies what it takes by the digests that led to it.

An entry appears whole, by rename, and is never changed. Locks (see `locks`): `.lock` while anything is added or
removed; one of several `.making-…` while an entry is made; an exclusive one on a file while it is written, so that what
a killed process left is known by having none; a shared one while it is read, so that nothing in use is removed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from vllm_delta_sync.errors import CacheError
from vllm_delta_sync.log import locks
from vllm_delta_sync.wire.frames import Buffer

Write: TypeAlias = Callable[[int, Buffer], None]  # (position in bytes, what to put there)

PATIENCE_S = 120.0  # of no progress by another process that makes an entry, before doing without the cache
_MAKERS = 64  # entries that may be made at the same time
_TEMPORARY = ".writing-"
_LOCK = ".lock"
# What files of other names are, nobody here knows: the directory may be one in which the user keeps things.
_ENTRY = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{32})?")
_UNFINISHED = re.compile(rf"{re.escape(_TEMPORARY)}{_ENTRY.pattern}\.[0-9a-f]{{32}}")


class Entry:
    """One file of the cache, kept from removal while this lives. `fresh`: made by this process.

    It may be changed by whoever can write it, and its disk may fail: what `read` and `view` give is to be verified.
    """

    def __init__(self, handle: int, size: int, *, fresh: bool) -> None:
        self.fresh = fresh
        self._size = size
        self._inode = os.fstat(handle).st_ino
        self._handle = os.dup(handle)  # and with it the shared lock
        weakref.finalize(self, os.close, self._handle)

    def is_at(self, path: Path) -> bool:
        """Whether that path still leads to this very file."""
        try:
            return os.lstat(path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def read(self, start: int, size: int) -> bytes:
        """A copy of `size` bytes, fewer where they cannot be read.

        Not by a mapping: a file that someone cuts short would end the process, and to wait for a disk would stop all
        its threads. The pages are the same ones for all processes that read them.
        """
        found = []
        with suppress(OSError):
            while size and (data := os.pread(self._handle, size, start)):
                found.append(data)
                start, size = start + len(data), size - len(data)
        return found[0] if len(found) == 1 else b"".join(found)

    def view(self) -> memoryview:
        """The whole file, mapped; of no bytes where it cannot be."""
        try:
            return memoryview(mmap.mmap(self._handle, self._size, prot=mmap.PROT_READ))
        except (OSError, ValueError):
            return memoryview(b"")


class NodeCache:
    """Entries in `directory`, together at most `max_bytes`; those least recently used go first.

    An entry's name is a SHA-256 in hex, or one and `-` and 32 hex digits; other files are neither counted nor removed.
    Any number of processes and threads may use one directory. Every method raises CacheError when it cannot be used:
    not this user's alone, unwritable, disk full, no room beside what is in use.

    Args:
        directory: on a disk of this node; made when first used, for this user only.
        patience_s: seconds without progress of another process that makes an entry, before giving up on it.
    """

    def __init__(self, directory: Path, max_bytes: int, *, patience_s: float = PATIENCE_S) -> None:
        self.directory = directory.absolute()
        self.max_bytes = max_bytes
        self._patience_s = patience_s

    def find(self, name: str, size: int) -> Entry | None:
        """The entry of that name, if it is there and has that size, 1 or more."""
        with self.typed():
            self.prepare()
            return self._open(name, size)

    def make(self, name: str, size: int, fill: Callable[[Write], None], spoilt: Entry | None = None) -> Entry:
        """The entry of that name, written by this process unless another one is found to have done so meanwhile.

        Args:
            fill: writes all `size` bytes and verifies them; what it raises is passed on, and nothing remains.
            spoilt: the entry of this name that turned out to be wrong, which is removed first.
        """
        path = self.directory / name
        maker = self.directory / f".making-{zlib.crc32(name.encode()) % _MAKERS:02d}"
        with self.typed():
            self.prepare()
            with locks.alone(maker, self._patience_s, lambda: self._progress(name)):
                found = self._open(name, size)
                if found is not None and (spoilt is None or not spoilt.is_at(path)):
                    return found
                path.unlink(missing_ok=True)
                return self._write(path, size, fill)

    def prepare(self) -> None:
        """Make the directory if it is not there (any more), and require that nobody else can touch it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise CacheError(
                f"{self.directory}: a cache must be a directory that belongs to this user (uid {os.geteuid()}) and "
                f"that no other may enter; it is of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
            )

    @contextmanager
    def typed(self) -> Iterator[None]:
        """Turn what the operating system says into CacheError."""
        try:
            yield
        except OSError as error:
            where = error.filename or self.directory
            raise CacheError(f"the cache in {self.directory} cannot be used: {where}: {error.strerror}") from error

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock under which files are added and removed; for moments."""
        return locks.alone(self.directory / _LOCK, self._patience_s)

    def _open(self, name: str, size: int) -> Entry | None:
        try:
            handle = os.open(self.directory / name, locks.READ)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # a link is nothing that this module made
                return None
            raise
        try:
            if os.fstat(handle).st_size != size or not locks.take(handle, shared=True):
                return None
            os.utime(handle)  # used now
            return Entry(handle, size, fresh=False)
        finally:
            os.close(handle)

    def _write(self, path: Path, size: int, fill: Callable[[Write], None]) -> Entry:
        temporary = path.with_name(f"{_TEMPORARY}{path.name}.{uuid.uuid4().hex}")
        with self.locked():
            self._make_room(size)
            handle = os.open(temporary, locks.CREATE | os.O_EXCL, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                os.truncate(handle, size)  # what others count when they make room
            except OSError:
                os.close(handle)
                raise
        try:
            os.posix_fallocate(handle, 0, size)  # a full disk shows here, not as a fault in the mapping
            fill(lambda position, data: write_all(handle, position, data))
            os.replace(temporary, path)
            fcntl.flock(handle, fcntl.LOCK_SH)
            return Entry(handle, size, fresh=True)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(handle)

    def _make_room(self, size: int) -> None:
        """Under `.lock`: remove what killed processes left, then unused entries, until `size` more bytes fit."""
        total, entries = size, []
        for path in self.directory.iterdir():
            found = _lstat(path)
            if found is None or not stat.S_ISREG(found.st_mode):
                continue
            if _UNFINISHED.fullmatch(path.name):
                total += 0 if locks.remove_if_free(path) else found.st_size
            elif _ENTRY.fullmatch(path.name):
                entries.append((found.st_mtime_ns, found.st_size, path))
                total += found.st_size
        for _, freed, path in sorted(entries):
            if total > self.max_bytes and locks.remove_if_free(path):
                total -= freed
        if total > self.max_bytes:
            raise CacheError(
                f"the cache in {self.directory} has no room for {size} bytes: it may hold {self.max_bytes}, and "
                f"{total - size} are in use; raise cache_bytes"
            )

    def _progress(self, name: str) -> list[int]:
        """Changes whenever a process that makes this entry writes."""
        found = map(_lstat, self.directory.glob(f"{_TEMPORARY}{name}.*"))
        return [one.st_mtime_ns for one in found if one is not None]


def _lstat(path: Path) -> os.stat_result | None:
    """None when another process has removed it."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def write_all(handle: int, position: int, data: Buffer) -> None:
    """Write all of `data` to an open file from a position on."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, position)
        view, position = view[written:], position + written
