"""Which bytes of which shards to fetch for a set of blocks: few requests, and few bytes that nobody needs.

Does not fetch. Pure arithmetic on a table that was checked against its shards (`wire.consistency`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_delta_sync.wire.manifest import ShardRef
from vllm_delta_sync.wire.table import Block

SPARE = 16  # one byte that nobody needs may come along with so many that are needed
LARGEST_HOLE = 1 << 20  # bytes; skipping a larger one saves more time than a request costs
MOST_SPANS = 512  # of one shard


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Bytes start … end−1 of an object."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ShardRead:
    """What to fetch of one shard.

    Args:
        spans: ascending, with holes between them; one over the whole file where `whole`.
        blocks: those wanted, ascending by offset; each lies within one span.
    """

    shard: int
    ref: ShardRef
    spans: tuple[Span, ...]
    blocks: tuple[Block, ...]

    @property
    def whole(self) -> bool:
        """Whether this is all of the file, which its own digest proves."""
        return self.spans == (Span(0, self.ref.size),)

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(span.size for span in self.spans)

    @property
    def name(self) -> str:
        """Names the bytes by what they are: equal for equal spans of an equal shard."""
        if self.whole:
            return self.ref.sha256
        listed = ",".join(f"{span.start}-{span.end}" for span in self.spans)
        return f"{self.ref.sha256}-{hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()}"

    def places(self) -> dict[int, int]:
        """Where each block begins in the spans laid one after the other, by its offset."""
        found = {}
        rest = iter(self.spans)
        span, before = next(rest), 0
        for block in self.blocks:
            start = self.ref.data_start + block.offset
            while start >= span.end:
                before += span.size
                span = next(rest)
            found[block.offset] = before + start - span.start
        return found


def wholes(shards: Sequence[ShardRef], wanted: Iterable[Block]) -> list[ShardRead]:
    """All of every shard that a block wanted is in."""
    return [_whole(shards, shard, blocks) for shard, blocks in sorted(_by_shard(wanted).items())]


def plan(shards: Sequence[ShardRef], table_bytes: int, wanted: Iterable[Block]) -> list[ShardRead]:
    """What to fetch for the blocks wanted, shard by shard, when the table was fetched by itself.

    Holes are filled from the smallest on while all that is not needed stays within 1/`SPARE` of what is (table
    included); whole shards are taken when they fit in there too. Only a shard that would take more than `MOST_SPANS`
    requests goes beyond that.
    """
    by_shard = _by_shard(wanted)
    needed = {shard: sum(block.stored for block in blocks) for shard, blocks in by_shard.items()}
    budget = (table_bytes + sum(needed.values())) // SPARE
    spans = {shard: _spans(shards[shard].data_start, blocks) for shard, blocks in by_shard.items()}
    holes = sorted(hole for shard, found in spans.items() for hole in _holes(shard, found))
    filled: dict[int, set[int]] = {shard: set() for shard in spans}
    for size, shard, index in holes:
        if size <= min(budget, LARGEST_HOLE):
            budget -= size
            filled[shard].add(index)
    for size, shard, index in holes:
        if index not in filled[shard] and len(spans[shard]) - len(filled[shard]) > MOST_SPANS:
            budget -= size
            filled[shard].add(index)
    reads = []
    for shard in sorted(spans):
        read = ShardRead(shard, shards[shard], _joined(spans[shard], filled[shard]), tuple(by_shard[shard]))
        rest = shards[shard].size - read.size
        if 0 < rest <= budget:
            budget -= rest
            read = _whole(shards, shard, by_shard[shard])
        reads.append(read)
    return reads


def _by_shard(wanted: Iterable[Block]) -> dict[int, list[Block]]:
    """Ascending by offset."""
    found: dict[int, list[Block]] = {}
    for block in sorted(wanted, key=lambda block: block.offset):
        found.setdefault(block.shard, []).append(block)
    return found


def _whole(shards: Sequence[ShardRef], shard: int, blocks: Iterable[Block]) -> ShardRead:
    ref = shards[shard]
    return ShardRead(shard, ref, (Span(0, ref.size),), tuple(blocks))


def _spans(data_start: int, blocks: Iterable[Block]) -> list[Span]:
    """The bytes of blocks ascending by offset, those that touch in one."""
    found: list[Span] = []
    for block in blocks:
        start = data_start + block.offset
        if found and found[-1].end == start:
            start = found.pop().start
        found.append(Span(start, data_start + block.offset + block.stored))
    return found


def _holes(shard: int, spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """(bytes, shard, index of the span before it) of every hole."""
    return [(after.start - before.end, shard, index) for index, (before, after) in enumerate(pairwise(spans))]


def _joined(spans: Sequence[Span], filled: set[int]) -> tuple[Span, ...]:
    found = [spans[0]]
    for index, span in enumerate(spans[1:]):
        if index in filled:
            found[-1] = Span(found[-1].start, span.end)
        else:
            found.append(span)
    return tuple(found)
