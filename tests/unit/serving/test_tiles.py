"""Ranks decode ctx blocks against their own memory: whole tiles exactly, and tiles held in part not at all."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from table_rows import row_of

from tests.unit.serving.ctx_blocks import COLUMNS, KEPT, MATRIX, ROWS, ctx_block, publish, region, train, weights
from tests.unit.serving.fleet import Following
from tests.unit.serving.served import Served
from vllm_delta_sync import Publisher, kernels
from vllm_delta_sync.errors import BaseNeeded, StateHashMismatch, UnsupportedLayout
from vllm_delta_sync.log import FoldSchedule
from vllm_delta_sync.native import Changes, CtxGrid
from vllm_delta_sync.serving.affine import Box, View
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.tiles import Columns, TileReader, columns_of, fill, held_of_tiles
from vllm_delta_sync.wire import ctx
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.codecs import Context, ctx_of


def some(part: list[tuple[int, int, int]], tensor: np.ndarray) -> np.ndarray:
    """A view of some of the tensor's elements: low, size and step in each dimension."""
    index = tuple(
        slice(low % n, low % n + size, step) for n, (low, size, step) in zip(tensor.shape, part, strict=False)
    )
    return tensor[index]


def box_of(held: np.ndarray) -> Box:
    """Of a view of a tensor u16 that counts its elements from one."""
    try:
        return Box.of(View(int(held.reshape(-1)[0]) - 1, held.shape, tuple(stride // 2 for stride in held.strides)))
    except UnsupportedLayout:
        assume(False)  # no region is like that
        raise


SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)

PARTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 2)), min_size=4, max_size=4)


@given(shape=SHAPES, part=PARTS, block=st.tuples(st.integers(0, 2000), st.integers(1, 2000)))
def test_a_block_is_filled_with_what_a_region_holds_of_it_and_nothing_else(
    shape: tuple[int, ...], part: list[tuple[int, int, int]], block: tuple[int, int]
) -> None:
    tensor = np.arange(1, prod(shape) + 1, dtype=np.uint16).reshape(shape)
    held = some(part, tensor)
    start = block[0] % tensor.size
    old = np.zeros(min(block[1], tensor.size - start), np.uint16)
    fill(box_of(held), np.ascontiguousarray(held).reshape(-1), start, old)
    wanted = np.where(np.isin(tensor, held), tensor, 0).reshape(-1)
    np.testing.assert_array_equal(old, wanted[start : start + old.size])


@given(shape=SHAPES, part=PARTS, rows=st.integers(1, 6), row_length=st.integers(1, 40), start=st.integers(0, 200))
def test_what_a_region_holds_of_a_block_is_known_without_looking_at_elements(
    shape: tuple[int, ...], part: list[tuple[int, int, int]], rows: int, row_length: int, start: int
) -> None:
    tensor = np.arange(1, prod(shape) + 1, dtype=np.uint16).reshape(shape)
    start %= tensor.size
    row_length = min(row_length, tensor.size - start)
    rows = min(rows, (tensor.size - start) // row_length)
    held = some(part, tensor)
    box = box_of(held)
    mine = np.isin(tensor, held).reshape(-1)[start : start + rows * row_length].reshape(rows, row_length)
    split = max(1, row_length // 3)
    strips = np.array([(0, split), *([(split, row_length - split)] if split < row_length else [])], np.int64)
    grid = CtxGrid(rows, row_length, strips)
    counted = [mine[r : r + h, c : c + w].sum() for r, h, c, w in grid.boxes.tolist()]
    np.testing.assert_array_equal(held_of_tiles(grid, (box,), start), counted)
    found = columns_of(box, start, rows, row_length)
    columns = np.flatnonzero(mine[0])
    same = columns.size and (mine == mine[0]).all() and columns[-1] - columns[0] + 1 == columns.size
    assert (found is not None) == bool(same)
    if found is not None:
        elements = np.ascontiguousarray(held).reshape(-1)[found.rank :][: rows * found.count]
        block = tensor.reshape(-1)[start : start + rows * row_length].reshape(rows, row_length)
        assert (found.first, found.count) == (columns[0], columns.size)
        np.testing.assert_array_equal(elements.reshape(rows, -1), block[:, columns])


def test_what_boxes_hold_is_told_tile_by_tile() -> None:
    wide = 1 << 17
    grid = CtxGrid(5, wide, np.array([(0, wide)], np.int64))  # tiles of two rows
    two = (Box(wide, (wide + 3,), (1,)), Box(3 * wide, (wide,), (1,)))
    assert held_of_tiles(grid, two, 0).tolist() == [wide, wide + 3, 0]


def test_blocks_of_very_many_short_rows_are_looked_up_in_little_memory() -> None:
    rows, strips = 1 << 20, np.array([(0, 2), (2, 2)], np.int64)
    grid, right = CtxGrid(rows, 4, strips), Box(2, (rows, 2), (4, 1))
    torn = (Box(2, (rows // 2, 2), (4, 1)), Box(2 * rows + 1, (rows // 2, 2), (4, 1)))
    bent = Box(0, (2, rows // 2, 2), (2 * rows + 1, 4, 1))  # from the middle on one column to the right
    tracemalloc.start()
    found = columns_of(right, 0, rows, 4), [columns_of(box, 0, rows, 4) for box in (*torn, bent)]
    held = held_of_tiles(grid, (right,), 0), held_of_tiles(grid, torn, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == (Columns(2, 2, 0), [None, None, None])
    tile = 1 << 18
    assert held[0].tolist() == [0] * 8 + [tile] * 8
    assert held[1].tolist() == [0] * 4 + [tile // 2] * 4 + [tile] * 4 + [tile // 2] * 4
    assert peak < 16 << 20


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(
    ("dim", "parts"),
    [
        (0, [((0, 0), (ROWS, COLUMNS))]),
        (0, [((ROWS // 2, 0), (ROWS // 2, COLUMNS))]),
        (1, [((0, COLUMNS // 2), (ROWS, COLUMNS // 2))]),
        (0, [((0, 0), (100, COLUMNS)), ((100, 0), (92, COLUMNS))]),
        (1, [((0, 160), (200, 160)), ((200, 160), (184, 160)), ((0, 160), (200, 160))]),
    ],
    ids=["whole", "rows", "columns", "rows in two regions", "columns in two regions, one of them twice"],
)
def test_a_rank_finds_the_changes_of_what_it_holds_however_it_is_kept(
    dim: int, parts: list[tuple[tuple[int, int], tuple[int, int]]], kept: str
) -> None:
    block, payload, old, changes = ctx_block(dim)
    matrix = torch.from_numpy(old.view(np.int16)).view(torch.bfloat16).view(ROWS, COLUMNS)
    regions, storages, held = [], [], np.zeros((ROWS, COLUMNS), np.bool_)
    for low, size in parts:
        place = tuple(slice(first, first + count) for first, count in zip(low, size, strict=True))
        held[place] = True
        live = KEPT[kept](matrix[place])
        regions.append(region(live, low, size, len(storages), "F32" if kept == "as fp32" else "BF16"))
        storages.append(torch.as_strided(live, (live.numel(),), (1,)))
    reader = TileReader(regions, LiveMemory(storages, kernels.select("auto", torch.device("cpu"))))
    found = reader.decode(block, payload, range(len(parts)))
    mine = held.reshape(-1)[changes.positions]
    np.testing.assert_array_equal(found.positions, changes.positions[mine])
    np.testing.assert_array_equal(found.new_bits(changes.old[mine]), changes.new[mine])


def test_values_are_read_where_they_lie_and_not_copied() -> None:
    block, payload, old, _ = ctx_block(1, 2e-7)
    live = torch.from_numpy(old.view(np.int16)).view(torch.bfloat16).view(ROWS, COLUMNS)[:, : COLUMNS // 2].clone()
    memory = LiveMemory([live.view(-1)], kernels.select("auto", torch.device("cpu")))
    where = region(live, (0, 0), (ROWS, COLUMNS // 2), 0, "BF16")
    assert memory.elements(where, "BF16").ctypes.data == live.data_ptr()
    TileReader([where], memory).decode(block, payload, [0])  # what a thread keeps for the next block is there by now
    tracemalloc.start()
    found = TileReader([where], memory).decode(block, payload, [0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.positions.size and peak < live.nbytes // 4


@pytest.mark.parametrize("parts", [1, 2])
def test_changes_are_as_many_as_stated_where_a_rank_holds_all_of_a_block(parts: int) -> None:
    rng = np.random.default_rng(0)
    old = (rng.normal(0, 0.02, MATRIX.numel).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    where = np.arange(0, COLUMNS, 4, dtype=np.uint32)  # only the first tile has changes
    changes = Changes(where, old[where], old[where] + np.uint16(1))
    model = ctx.make_model(lambda: iter([ctx.Sample(MATRIX, 0, old, changes, 0)]), 1.0)
    coded = ctx_of(MATRIX, changes, 0, Context(model, old, 0))
    assert coded is not None
    block, payload = row_of(MATRIX, coded)
    live = torch.from_numpy(old.view(np.int16)).view(torch.bfloat16).view(ROWS, COLUMNS)
    rows = ROWS // parts
    storages = [live[first : first + rows].clone() for first in range(0, ROWS, rows)]
    regions = [region(part, (i * rows, 0), (rows, COLUMNS), i, "BF16") for i, part in enumerate(storages)]
    memory = LiveMemory([part.view(-1) for part in storages], kernels.select("auto", torch.device("cpu")))
    found = TileReader(regions, memory).decode(block, payload, range(parts))
    np.testing.assert_array_equal(found.positions, where)
    with pytest.raises(StateHashMismatch, match=rf"{where.size} changes, {where.size + 1} stated"):
        TileReader(regions, memory).decode(replace(block, changed=where.size + 1), payload, range(parts))


def test_live_values_of_another_version_are_named_and_not_the_log() -> None:
    block, payload, old, _ = ctx_block(0)
    live = torch.from_numpy(np.roll(old, 1).view(np.int16)).view(torch.bfloat16).view(ROWS, COLUMNS)
    memory = LiveMemory([live.view(-1)], kernels.select("auto", torch.device("cpu")))
    with pytest.raises(StateHashMismatch, match=r"'w'.*not those of the version before"):
        TileReader([region(live, (0, 0), (ROWS, COLUMNS), 0, "BF16")], memory).decode(block, payload, [0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_follow_a_log_of_ctx_blocks_each_from_its_own_memory(tmp_path: Path, ranks: int) -> None:
    # 4100 tokens are padded to 4160, so the last band is held in part, by one rank, with all there is of it.
    base = weights(4100)
    states = publish(tmp_path, dict(base), 4)
    served = Following(tmp_path, base, ranks, padding=64)
    assert CTX in {block.codec for hop in served.deltas() for block in served.log.table(hop).blocks}
    served.join()
    for hop in served.deltas():
        served.take(hop)
        assert served.serves(states[hop.to])


def test_a_rank_that_holds_a_part_of_a_tile_says_so_and_changes_nothing(tmp_path: Path) -> None:
    base = weights(4098)
    publish(tmp_path, dict(base), 1)
    served = Following(tmp_path, base, 2, padding=2)  # 2049 rows each, in the midst of a band of 260
    served.join()
    with pytest.raises(BaseNeeded, match=r"'embed'.*only a part of its tile"):
        served.follow()
    assert served.serves(base)


def test_a_server_that_holds_parts_of_tiles_goes_by_folds(tmp_path: Path) -> None:
    base = weights(4098)
    state, folds = dict(base), FoldSchedule(base=2, levels=1, reach=0)
    with Publisher.open(tmp_path, base=state, folds=folds, anchors=None) as publisher:
        served = Served(tmp_path, base, 2, padding=2)
        for step in range(4):
            train(state, step)
            publisher.publish(state)
            publisher.wait()
            served.look(5.0)
    for _ in range(4):
        served.look(60.0)  # after all it waits between attempts
    assert served.serves(state) and served.status.served == 4 and 1 not in served.passed
    assert set(served.status.failures) == {"base_needed"}
