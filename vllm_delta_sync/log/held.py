"""Bytes at hand under a name: an entry of the node's cache, made if need be, or memory, or another file.

Does not know what the bytes are or where they come from: a `Fill` fetches and verifies them.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable
from typing import TypeAlias

from vllm_delta_sync.errors import CacheError
from vllm_delta_sync.log.cache import Entry, NodeCache, Write, write_all
from vllm_delta_sync.wire.frames import Buffer

RETRY_S = 300.0  # after the cache failed, before it is tried again
PIECE_BYTES = 32 << 20  # written to a file at a time

Fill: TypeAlias = Callable[[Write, int], None]  # writes all bytes, so many at a time at most, and verifies them
Apart: TypeAlias = Callable[[], memoryview]  # all bytes, had and verified without the cache
Good: TypeAlias = Callable[[Buffer], bool]  # whether bytes are those expected


class Stash:
    """Where a reader keeps what it fetches: the cache while that works.

    Args:
        cache: None for memory only.
        clock: seconds, monotonic.
    """

    def __init__(self, cache: NodeCache | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache, self._clock = cache, clock
        self._off_until: float | None = None
        self._failure: CacheError | None = None

    @property
    def cache(self) -> NodeCache | None:
        """The cache, unless it failed a short while ago."""
        if self._off_until is not None and self._clock() >= self._off_until:
            self._off_until = None
        return self._cache if self._off_until is None else None

    def give_up(self, error: CacheError) -> None:
        """Do without the cache for a while."""
        self._failure, self._off_until = error, self._clock() + RETRY_S

    def take_failure(self) -> CacheError | None:
        """Why the cache was given up since this was last asked."""
        failure, self._failure = self._failure, None
        return failure

    def get(self, name: str, size: int, fill: Fill, apart: Apart | None = None) -> Held:
        """Bytes of that name, found or filled; where the cache cannot be used by `apart`, or else in memory."""
        return Held(self, name, size, fill, apart or (lambda: _in_memory(size, fill)))


class Held:
    """`size` bytes; what is taken of them is verified, and they are had anew when it is not what it should be."""

    def __init__(self, stash: Stash, name: str, size: int, fill: Fill, apart: Apart) -> None:
        self._stash, self._name, self._size, self._fill, self._apart = stash, name, size, fill, apart
        self._entry = self._from_cache() if size else None
        self._data = apart() if self._entry is None else memoryview(b"")
        self._renewed = False

    @property
    def fetched(self) -> bool:
        """Whether this process fetched them, rather than finding them in the cache."""
        return self._entry is None or self._entry.fresh

    def take(self, start: int, size: int, good: Good) -> bytes:
        """A copy of so many of the bytes: a private one is verified once and not looked at in a shared file again."""
        while self._entry is not None:
            data = self._entry.read(start, size)
            if good(data):
                return data
            self._renew()
        return bytes(self._data[start : start + size])

    def view(self, good: Good) -> memoryview:
        """All of the bytes, mapped where they are a file. Whoever can write that file can change them afterwards."""
        while self._entry is not None:
            data = self._entry.view()
            if good(data):
                return data
            self._renew()
        return self._data

    def _renew(self) -> None:
        """Once by way of the cache; when that is wrong again, it is no accident."""
        spoilt, self._entry = self._entry, None
        if not self._renewed:
            self._renewed = True
            self._entry = self._from_cache(spoilt)
        if self._entry is None:
            self._data = self._apart()

    def _from_cache(self, spoilt: Entry | None = None) -> Entry | None:
        cache = self._stash.cache
        if cache is None:
            return None
        try:
            found = cache.find(self._name, self._size) if spoilt is None else None
            return found or cache.make(self._name, self._size, lambda write: self._fill(write, PIECE_BYTES), spoilt)
        except CacheError as error:
            self._stash.give_up(error)
            return None


def in_temporary(size: int, fill: Fill) -> memoryview:
    """All bytes in a file that ends with what is returned; in memory where they are no more than one piece.

    Raises CacheError when there is no room for them among the temporary files.
    """
    if size <= PIECE_BYTES:
        return _in_memory(size, fill)
    try:
        with tempfile.TemporaryFile(prefix="delta-sync-", buffering=0) as file:
            handle = file.fileno()
            fill(lambda position, data: write_all(handle, position, data), PIECE_BYTES)
            return memoryview(mmap.mmap(handle, size, prot=mmap.PROT_READ))
    except OSError as error:
        raise CacheError(
            f"{size} bytes are to be held in a temporary file, for there is no cache to hold them: {error.strerror}; "
            "give the cache room, or name a directory that has it in TMPDIR"
        ) from error


def _in_memory(size: int, fill: Fill) -> memoryview:
    single: Buffer = b""  # all of it in one piece, which need not be copied
    pieces: bytearray | None = None

    def write(position: int, piece: Buffer) -> None:
        nonlocal single, pieces
        if len(piece) == size:
            single = piece
            return
        if pieces is None:
            pieces = bytearray(size)
        pieces[position : position + len(piece)] = piece

    fill(write, size)
    return memoryview(single or pieces or b"").toreadonly()
