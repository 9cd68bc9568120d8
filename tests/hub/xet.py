"""The Xet side of the stand-in: uploaded xorbs and shards, and how a file is put together from them.

Does not speak HTTP and does not compute hashes: it takes the client's word for them, as a test's server may.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

EMPTY = "0" * 64
HEADER = 8  # bytes before each chunk of a xorb
_RECORD = 48
_VERIFIED, _EXTENDED = 1 << 31, 1 << 30  # flags of a file in a shard: records that follow its segments
_END = b"\xff" * 32


class BadUpload(ValueError):
    """What a client sent breaks the format."""


class OutOfRange(ValueError):
    """The range asked for begins behind the end of the file."""


@dataclass(frozen=True)
class Chunk:
    """One chunk in a xorb: bytes start … end−1 of it, `length` bytes when unpacked."""

    start: int
    end: int
    length: int


@dataclass(frozen=True)
class Segment:
    """Chunks first … last−1 of a xorb, which are `length` bytes of a file."""

    xorb: str
    first: int
    last: int
    length: int


def parse_xorb(body: bytes) -> list[Chunk]:
    """The chunks of a xorb; whatever follows them (a footer) is passed over."""
    chunks, at = [], 0
    while at + HEADER <= len(body) and body[at] == 0:
        packed = int.from_bytes(body[at + 1 : at + 4], "little")
        end = at + HEADER + packed
        if end > len(body):
            raise BadUpload("a chunk runs over the end of the xorb")
        chunks.append(Chunk(at, end, int.from_bytes(body[at + 5 : at + 8], "little")))
        at = end
    if not chunks:
        raise BadUpload("a xorb without chunks")
    return chunks


def parse_shard(body: bytes) -> dict[str, list[Segment]]:
    """The files of a shard by hash."""
    files: dict[str, list[Segment]] = {}
    at = _RECORD
    while True:
        record = body[at : at + _RECORD]
        if len(record) < _RECORD:
            raise BadUpload("the list of files has no end")
        if record[:32] == _END:
            return files
        flags, count = struct.unpack_from("<II", record, 32)
        at += _RECORD
        segments = []
        for _ in range(count):
            _, length, first, last = struct.unpack_from("<IIII", body, at + 32)
            segments.append(Segment(hash_hex(body[at : at + 32]), first, last, length))
            at += _RECORD
        at += _RECORD * (count * bool(flags & _VERIFIED) + bool(flags & _EXTENDED))
        files[hash_hex(record[:32])] = segments


def hash_hex(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


class Cas:
    """Xorbs as files in a directory, and the files that shards say they make up."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._xorbs: dict[str, list[Chunk]] = {}
        self._files: dict[str, list[Segment]] = {EMPTY: []}

    def add_xorb(self, name: str, body: bytes) -> bool:
        """Keep a xorb; returns whether it is new."""
        if name in self._xorbs:
            return False
        chunks = parse_xorb(body)
        (self._directory / name).write_bytes(body)
        self._xorbs[name] = chunks
        return True

    def add_shard(self, body: bytes) -> None:
        files = parse_shard(body)
        for segment in (segment for segments in files.values() for segment in segments):
            chunks = self._xorbs.get(segment.xorb)
            if chunks is None:
                raise BadUpload(f"xorb {segment.xorb} was never uploaded")
            if sum(chunk.length for chunk in chunks[segment.first : segment.last]) != segment.length:
                raise BadUpload(f"a segment of xorb {segment.xorb} is not as long as its chunks")
        self._files.update(files)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none of that hash."""
        segments = self._files.get(name)
        return None if segments is None else sum(segment.length for segment in segments)

    def read(self, xorb: str, start: int, end: int) -> bytes:
        """Bytes start … end−1 of a stored xorb."""
        with (self._directory / xorb).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def reconstruction(self, name: str, start: int, end: int | None, fetch_url: str) -> dict[str, Any]:
        """What a client must fetch for bytes start … end−1 of a file; KeyError when there is none, OutOfRange."""
        segments = self._files[name]
        total = sum(segment.length for segment in segments)
        end = total if end is None else min(end, total)
        if start >= end:
            raise OutOfRange(name)
        terms: list[dict[str, Any]] = []
        xorbs: dict[str, list[dict[str, Any]]] = {}
        position = skipped = 0
        for segment in segments:
            low, high = max(start - position, 0), min(end - position, segment.length)
            if low < high:
                first, last, before, length = self._cut(segment, low, high)
                if not terms:
                    skipped = low - before
                chunks = {"start": first, "end": last}
                terms.append({"hash": segment.xorb, "unpacked_length": length, "range": chunks})
                stored = self._xorbs[segment.xorb][first:last]
                place = {"start": stored[0].start, "end": stored[-1].end - 1}
                fetch = {"url": fetch_url + segment.xorb, "ranges": [{"chunks": chunks, "bytes": place}]}
                if fetch not in xorbs.setdefault(segment.xorb, []):
                    xorbs[segment.xorb].append(fetch)
            position += segment.length
        return {"offset_into_first_range": skipped, "terms": terms, "xorbs": xorbs}

    def _cut(self, segment: Segment, low: int, high: int) -> tuple[int, int, int, int]:
        """The chunks that hold bytes low … high−1 of a segment: first, last + 1, bytes before them, bytes in them."""
        lengths = [chunk.length for chunk in self._xorbs[segment.xorb][segment.first : segment.last]]
        edges = [0, *accumulate(lengths)]
        first = bisect_right(edges, low) - 1
        last = bisect_right(edges, high - 1)
        return segment.first + first, segment.first + last, edges[first], edges[last] - edges[first]
