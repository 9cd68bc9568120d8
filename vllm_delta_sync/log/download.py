"""Getting objects and ranges of them from the store: piece by piece, several at once, verified as they come.

Does not keep them: each piece goes to a `Write`, of a file or of memory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm_delta_sync.errors import DigestMismatch, NotFound, Unavailable
from vllm_delta_sync.log.cache import Write
from vllm_delta_sync.log.ranges import ShardRead, Span
from vllm_delta_sync.store import Content, Filed, Store
from vllm_delta_sync.wire import codecs
from vllm_delta_sync.wire.manifest import Found
from vllm_delta_sync.wire.table import Block

AT_ONCE = 8  # requests
AHEAD_BYTES = 64 << 20  # under way or waiting, besides the piece that is being taken


@dataclass(frozen=True, slots=True)
class Piece:
    """One request: bytes of the object, where to write them, and the blocks that lie in them whole."""

    span: Span
    position: int
    blocks: tuple[Block, ...] = ()


class Download:
    """Reads from one store, `most` bytes a request unless a single block is larger.

    `bytes` counts what came, also what was found wrong.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes = 0

    def object(self, ref: Found, write: Write, most: int) -> None:
        """All of an object; raises NotFound, or DigestMismatch when its size or SHA-256 is another one."""
        starts = range(0, ref.size, max(1, most))
        pieces = [Piece(Span(start, min(start + most, ref.size)), start) for start in starts]
        self._hinted(ref, lambda content: self._proven(ref, pieces, ref.sha256, write, content))

    def mapped(self, ref: Found) -> memoryview | None:
        """All of an object as the very file it is at the store, verified; None where the store has no files.

        A store replaces files and never changes one, so that what was verified stays. Raises as `object` does, and
        Unavailable when the file cannot be read.
        """
        file = self._store.opened(ref.key) if isinstance(self._store, Filed) else None
        if file is None:
            return None
        try:
            with file:
                size = os.fstat(file.fileno()).st_size
                self._require_size(ref, Span(0, ref.size), size)
                self._require(ref, hashlib.file_digest(file, "sha256").hexdigest(), ref.sha256)
                return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
        except OSError as error:
            raise Unavailable(
                f"{self._store.uri}/{ref.key}: {error.strerror}; mend the disk, then try again"
            ) from error

    def range(self, ref: Found, span: Span, sha256: str, write: Write) -> None:
        """Bytes of an object that have a SHA-256 of their own; raises as `object` does."""
        self._hinted(ref, lambda content: self._proven(ref, [Piece(span, 0)], sha256, write, content))

    def blocks(self, read: ShardRead, write: Write, most: int) -> None:
        """The spans of a shard laid one after the other, each block verified by its own digest; raises as `object`."""
        pieces = pieces_of(read, most)

        def get(content: Content | None) -> None:
            for piece, data in self._get(read.ref, pieces, content):
                view = memoryview(data)
                for block in piece.blocks:
                    start = read.ref.data_start + block.offset - piece.span.start
                    codecs.check_digest(block, view[start : start + block.stored])
                write(piece.position, data)

        self._hinted(read.ref, get)

    def _hinted(self, ref: Found, get: Callable[[Content | None], None]) -> None:
        """By content first: that is only a hint, and one that leads nowhere, or elsewhere, must not hide the object."""
        if ref.content is not None:
            try:
                return get(Content(ref.content, ref.size))
            except (NotFound, DigestMismatch):
                pass
        get(None)

    def _proven(self, ref: Found, pieces: Sequence[Piece], sha256: str, write: Write, content: Content | None) -> None:
        digest = hashlib.sha256()
        for piece, data in self._get(ref, pieces, content):
            digest.update(data)
            write(piece.position, data)
        self._require(ref, digest.hexdigest(), sha256)

    def _require(self, ref: Found, found: str, sha256: str) -> None:
        if found != sha256:
            raise DigestMismatch(
                f"{self._store.uri}/{ref.key}: SHA-256 {found} where {sha256} is stated; damaged or replaced since"
            )

    def _get(self, ref: Found, pieces: Sequence[Piece], content: Content | None) -> Iterator[tuple[Piece, bytes]]:
        """The pieces in order."""

        def get(span: Span) -> bytes:
            return self._store.get(ref.key, span.start, span.end, content=content)

        if len(pieces) == 1:
            yield pieces[0], self._checked(ref, pieces[0].span, get(pieces[0].span))
            return
        with ThreadPoolExecutor(AT_ONCE, "delta-sync-fetch") as pool:
            waiting: deque[tuple[Piece, Future[bytes]]] = deque()
            ahead = 0
            try:
                for piece in pieces:
                    while waiting and ahead + piece.span.size > AHEAD_BYTES:
                        first, future = waiting.popleft()
                        ahead -= first.span.size
                        yield first, self._checked(ref, first.span, future.result())
                        del future
                    waiting.append((piece, pool.submit(get, piece.span)))
                    ahead += piece.span.size
                while waiting:
                    first, future = waiting.popleft()
                    yield first, self._checked(ref, first.span, future.result())
                    del future
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _checked(self, ref: Found, span: Span, data: bytes) -> bytes:
        self._require_size(ref, span, len(data))
        return data

    def _require_size(self, ref: Found, span: Span, size: int) -> None:
        self.bytes += size
        if size != span.size:
            raise DigestMismatch(
                f"{self._store.uri}/{ref.key}: {size} bytes came of {span.start} to {span.end}; truncated or replaced"
            )


def pieces_of(read: ShardRead, most: int) -> list[Piece]:
    """Cut the spans of a shard into requests of at most `most` bytes, never through a block."""
    found: list[Piece] = []
    blocks, position = deque(read.blocks), 0
    for span in read.spans:
        start = span.start
        inside: list[Block] = []
        while blocks and (begin := read.ref.data_start + blocks[0].offset) < span.end:
            if inside and begin + blocks[0].stored - start > most:
                found.append(Piece(Span(start, begin), position, tuple(inside)))
                position += begin - start
                start, inside = begin, []
            inside.append(blocks.popleft())
        found.append(Piece(Span(start, span.end), position, tuple(inside)))
        position += span.end - start
    return found
