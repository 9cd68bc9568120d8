"""What is fetched of a shard: all that is wanted, little else, in few requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync.log import ranges
from vllm_delta_sync.log.ranges import MOST_SPANS, SPARE, Span
from vllm_delta_sync.wire.manifest import ShardRef
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec

SPEC = TensorSpec("t", "BF16", (1 << 20,))


def block(shard: int, offset: int, stored: int) -> Block:
    return Block(0, SPEC, offset, 1, 1, 1, shard, offset, (stored, 0), (1, 1), bytes(16))


def shard_ref(number: int, data: int, data_start: int = 4096) -> ShardRef:
    return ShardRef(key=f"s{number}", size=data_start + data, sha256=f"{number:064x}", data_start=data_start)


def laid_out(sizes: list[int], shard: int = 0) -> list[Block]:
    """Blocks one after the other."""
    found, offset = [], 0
    for size in sizes:
        found.append(block(shard, offset, size))
        offset += size
    return found


def spans_of(sizes: list[int], wanted: list[int], table: int = 0) -> list[tuple[int, int]]:
    """The spans for those wanted of blocks in one shard, from where its blocks begin."""
    blocks = laid_out(sizes)
    (read,) = ranges.plan([shard_ref(0, sum(sizes))], table, [blocks[index] for index in wanted])
    return [(span.start - 4096, span.end - 4096) for span in read.spans]


@pytest.mark.parametrize(
    ("sizes", "wanted", "spans"),
    [
        ([100, 100, 100], [1], [(100, 200)]),
        ([100_000, 100, 100, 50_000], [1, 2], [(100_000, 100_200)]),  # touching ones are one request
        ([9000, 900, 8000, 7000], [0, 2], [(0, 17_900)]),  # a hole of a twentieth is filled
        ([9000, 1200, 8000, 7000], [0, 2], [(0, 9000), (10_200, 18_200)]),  # one of a fourteenth is not
        ([9000, 600, 900, 700, 8000, 7000], [0, 2, 4], [(0, 10_500), (11_200, 19_200)]),  # the smaller one is
        ([40 << 20, (1 << 20) + 1, 40 << 20, 9 << 20], [0, 2], [(0, 40 << 20), ((41 << 20) + 1, (81 << 20) + 1)]),
        ([1 << 20, 1, 1 << 20], [0, 1, 2], [(-4096, (2 << 20) + 1)]),  # all of it: the file, proven as a whole
    ],
)
def test_spans_are_joined_where_that_is_cheap(
    sizes: list[int], wanted: list[int], spans: list[tuple[int, int]]
) -> None:
    assert spans_of(sizes, wanted) == spans


def test_a_shard_takes_no_more_than_so_many_requests_whatever_that_costs() -> None:
    sizes = [100, 1000 + 7] * (MOST_SPANS + 50)
    spans = spans_of(sizes, list(range(0, len(sizes), 2)))
    assert len(spans) == MOST_SPANS
    assert sum(end - start for start, end in spans) == 100 * (MOST_SPANS + 50) + 50 * 1007


def test_shards_without_a_wanted_block_are_left_alone() -> None:
    shards = [shard_ref(0, 1000), shard_ref(1, 1000), shard_ref(2, 1000)]
    assert [read.shard for read in ranges.plan(shards, 10, [block(2, 0, 5), block(0, 100, 5)])] == [0, 2]
    assert [read.shard for read in ranges.wholes(shards, [block(1, 0, 5)])] == [1]
    assert ranges.wholes(shards, [block(1, 0, 5)])[0].whole


@st.composite
def payloads(draw: st.DrawFn) -> tuple[list[ShardRef], list[Block], int]:
    """Shards full of blocks, those wanted of them, and the bytes of the table."""
    shards, wanted = [], []
    for number in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 1 << 21) | st.integers(1, 200), min_size=1, max_size=60))
        chosen = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
        blocks = laid_out(sizes, number)
        shards.append(shard_ref(number, sum(sizes), draw(st.integers(8, 9000))))
        wanted += [one for one, want in zip(blocks, chosen, strict=True) if want]
    return shards, draw(st.permutations(wanted)), draw(st.integers(1, 1 << 16))


@settings(max_examples=50, deadline=None)
@given(payloads())
def test_every_wanted_block_is_fetched_with_hardly_anything_else(
    payload: tuple[list[ShardRef], list[Block], int],
) -> None:
    shards, wanted, table = payload
    reads = ranges.plan(shards, table, wanted)
    needed = table + sum(one.stored for one in wanted)
    assert table + sum(read.size for read in reads) <= needed * (1 + 1 / SPARE)
    assert sorted((one.shard, one.offset) for read in reads for one in read.blocks) == sorted(
        (one.shard, one.offset) for one in wanted
    )
    for read in reads:
        assert read.spans[0].start >= 0 and read.spans[-1].end <= shards[read.shard].size
        assert all(before.end < after.start for before, after in pairwise(read.spans))
        file = bytes_of(read.spans)
        places = read.places()
        for one in read.blocks:
            start = read.ref.data_start + one.offset
            at = places[one.offset]
            assert (file(at), file(at + one.stored - 1)) == (start, start + one.stored - 1)


def bytes_of(spans: tuple[Span, ...]):  # type: ignore[no-untyped-def]
    """Which byte of the object a byte of the spans, laid one after the other, is."""

    def original(position: int) -> int:
        for span in spans:
            if position < span.size:
                return span.start + position
            position -= span.size
        raise IndexError(position)

    return original


def test_equal_bytes_have_equal_names_and_others_have_others() -> None:
    shards = [shard_ref(0, 10_000), shard_ref(1, 10_000)]
    name = ranges.plan(shards, 0, [block(0, 5, 100)])[0].name
    assert name == ranges.plan(shards, 0, [block(0, 5, 40), block(0, 45, 60)])[0].name
    assert name != ranges.plan(shards, 0, [block(0, 5, 101)])[0].name
    assert name != ranges.plan(shards, 0, [block(1, 5, 100)])[0].name
    assert ranges.wholes(shards, [block(0, 5, 100)])[0].name == shards[0].sha256
