"""Tensors, blocks, tables and shards keep what is put into them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import container, dtypes, shard
from vllm_delta_sync.wire.table import Block, VersionTable
from vllm_delta_sync.wire.tensors import BLOCK_ELEMENTS, TensorSpec, split_blocks


def test_the_dtype_table_is_closed_both_ways() -> None:
    assert [dtypes.by_name(dtypes.by_code(code).name).code for code in range(1, 13)] == list(range(1, 13))
    for code in (0, 13, 255):
        with pytest.raises(MalformedObject):
            dtypes.by_code(code)
    for name in ("float32", "", "C64", "__class__"):
        with pytest.raises(MalformedObject):
            dtypes.by_name(name)


@pytest.mark.parametrize(
    "shape",
    [(), (5,), (1 << 22,), ((1 << 22) + 1,), (3, 5000, 1000), (7, 1 << 20), (3, 1 << 23), (9, 3, 1 << 21), (2, 2, 2)],
)
def test_blocks_cover_a_tensor_in_order_and_in_whole_rows(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("t", "BF16", shape)
    blocks = split_blocks(spec)
    assert sum(count for _, count in blocks) == spec.numel
    assert [start for start, _ in blocks] == [0, *np.cumsum([count for _, count in blocks])[:-1].tolist()]
    assert max(count for _, count in blocks) <= BLOCK_ELEMENTS
    row = math.prod(shape[1:])
    for start, count in blocks:
        if row > BLOCK_ELEMENTS:
            assert start // row == (start + count - 1) // row, "a block spans two rows that do not fit in one"
        else:
            assert start % row == 0
            assert count % row == 0


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (14336, 4096), (49152, 576), (151936, 1024), (28672, 8192), (16, 1 << 20)]
)
def test_ranks_that_split_a_large_tensor_s_rows_share_no_block(shape: tuple[int, ...], ranks: int) -> None:
    spec = TensorSpec("t", "BF16", shape)
    share = spec.numel // ranks
    for start, count in split_blocks(spec):
        assert start // share == (start + count - 1) // share


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((1536, 576), 1),
        ((2048, 1023), 1),
        ((2048, 1024), 2),
        ((4096, 4096), 16),
        ((14336, 4096), 16),
        ((28672, 8192), 64),
        ((8, 2048, 1024), 8),
        ((4, 14336, 4096), 64),
    ],
)
def test_no_tensor_is_cut_finer_than_that_takes(shape: tuple[int, ...], blocks: int) -> None:
    assert len(split_blocks(TensorSpec("t", "BF16", shape))) == blocks


def test_a_tensor_without_elements_has_no_blocks() -> None:
    assert split_blocks(TensorSpec("t", "BF16", (0, 4))) == []


NAMES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\n\0"), min_size=1, max_size=20)


@st.composite
def tables(draw: st.DrawFn) -> VersionTable:
    names = sorted(draw(st.sets(NAMES, max_size=6)), key=str.encode)
    tensors, blocks, offset = [], [], 0
    for index, name in enumerate(names):
        dtype = dtypes.by_code(draw(st.integers(1, 12)))
        spec = TensorSpec(name, dtype.name, draw(st.sampled_from([(), (9,), (300, 4), (2, 3, 4)])))
        tensors.append(spec)
        at = 0
        while at < spec.numel and draw(st.booleans()):
            count = draw(st.integers(1, spec.numel - at))
            length = (0, count * spec.width)
            changed = draw(st.integers(1, count))
            digest = draw(st.binary(min_size=16, max_size=16))
            blocks.append(Block(index, spec, at, count, 0, changed, 0, offset, length, length, digest))
            offset, at = offset + sum(length), at + count
    lanes = np.random.default_rng(0).integers(0, 1 << 32, (len(names), 4), np.uint32)
    return VersionTable(tuple(tensors), lanes, tuple(blocks))


@given(tables())
def test_a_table_comes_back_as_it_was(table: VersionTable) -> None:
    found = VersionTable.from_bytes(table.to_bytes())
    assert found.tensors == table.tensors
    assert found.blocks == table.blocks
    np.testing.assert_array_equal(found.hashes, table.hashes)


def test_a_table_knows_tensors_that_the_base_does_not() -> None:
    spec = TensorSpec("t", "BF16", (4,))
    table = VersionTable((spec,), np.zeros((1, 4), np.uint32), ())
    table.require_known({"t": spec, "u": spec}, "here")
    for base in ({}, {"t": TensorSpec("t", "F16", (4,))}, {"t": TensorSpec("t", "BF16", (2, 2))}):
        with pytest.raises(MalformedObject, match=r"here: tensor 't' is BF16 \[4\]"):
            table.require_known(base, "here")


def test_a_shard_is_a_safetensors_file_of_the_payloads_end_to_end() -> None:
    ends = shard.Ends("ab" * 16, 6, 7)
    data, start = shard.pack_shard(ends, [b"one", memoryview(b"two"), b""])
    assert data[start:] == b"onetwo"
    assert safetensors.numpy.load(data)["blocks"].tobytes() == b"onetwo"
    assert shard.open_shard(data, ends, "x", first=False).blocks == b"onetwo"
    for other in (shard.Ends("cd" * 16, 6, 7), shard.Ends("ab" * 16, 5, 7), shard.Ends("ab" * 16, 6, 8)):
        with pytest.raises(MalformedObject, match="metadata"):
            shard.open_shard(data, other, "x", first=False)


def test_a_first_shard_holds_the_table_right_before_the_payloads() -> None:
    ends = shard.Ends("ab" * 16, 6, 7)
    data, start = shard.pack_shard(ends, [b"one"], b"table")
    found = safetensors.numpy.load(data)
    assert (found["table"].tobytes(), found["blocks"].tobytes()) == (b"table", b"one")
    opened = shard.open_shard(data, ends, "x", first=True)
    assert (opened.table, opened.table_start, opened.blocks, opened.data_start) == (b"table", start - 5, b"one", start)
    assert data[opened.table_start :] == b"tableone"


def test_a_shard_with_other_tensors_than_its_place_asks_for_is_refused() -> None:
    ends = shard.Ends("ab" * 16, 6, 7)
    sizes = {"table": ("table", "U8", (2,)), "blocks": ("blocks", "U8", (2,)), "wide": ("blocks", "U16", (1,))}
    for names, first in (
        (["blocks"], True),
        (["table"], True),
        (["blocks", "table"], True),
        (["table", "wide"], True),
        (["table", "blocks"], False),
    ):
        data = container.layout([sizes[name] for name in names], ends.metadata()) + bytes(2 * len(names))
        with pytest.raises(MalformedObject, match="holds exactly"):
            shard.open_shard(data, ends, "x", first=first)
