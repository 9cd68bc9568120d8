"""Decodes the tiles of ctx blocks that one rank holds, against the old values in its live memory.

Reads live memory, writes none. Does not fetch, and does not know what becomes of the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vllm_delta_sync.errors import BaseNeeded, MalformedObject, StateHashMismatch
from vllm_delta_sync.native import CtxGrid
from vllm_delta_sync.native.types import I64, U8, Bits
from vllm_delta_sync.serving.affine import Box, Region
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.wire import dtypes
from vllm_delta_sync.wire.codecs import ctx_header, decode_tiles, decode_window, encoded_of
from vllm_delta_sync.wire.ctx import CtxHeader, CtxWindow
from vllm_delta_sync.wire.encoded import DecodedBlock
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block

_ROWS_AT_ONCE = 1 << 14  # of a block, or those of one tile: bounds what it takes to look up blocks of short rows


class TileReader:
    """Decodes ctx blocks, which come tensor by tensor; keeps what it read of the last tensor only.

    Where a region holds the same columns of each row of a block, its elements are decoded against as they lie: in live
    memory itself, if that is the host's and nothing lies between them. Else a block of old values is put together.

    Args:
        regions: the rank's layout; the elements of two regions of a tensor are the same, or none are.
        memory: where old values are read.
    """

    def __init__(self, regions: Sequence[Region], memory: LiveMemory) -> None:
        self._regions = regions
        self._memory = memory
        self._tensor = ""
        self._elements: dict[int, Bits] = {}  # of regions of that tensor

    def decode(self, block: Block, payload: Buffer, held: Sequence[int]) -> DecodedBlock:
        """The changes of a block in the tiles that the regions `held`, those of its tensor, hold.

        Raises:
            BaseNeeded: a tile that changes is held in part.
            StateHashMismatch: the live values are not those that the block was made from.
            DigestMismatch, MalformedObject: the block is not what its table states.
        """
        what = f"block {block}"
        encoded = encoded_of(block, payload)
        header = ctx_header(block.spec, block.start, block.count, encoded, what)
        if block.spec.name != self._tensor:
            self._tensor, self._elements = block.spec.name, {}
        found = window_of(header, block.start, self._regions, held)
        if found is not None:
            window, index, rank = found
            old = self._read(block, index)[rank : rank + window.header.grid.elements]
            return sound(lambda: decode_window(window, encoded, old, what))
        boxes = _boxes(self._regions, held)
        wanted = _held_tiles(header, tuple(boxes), block.start, what)
        old = self._put_together(block, boxes if wanted[header.sizes > 0].any() else {})
        return sound(lambda: decode_tiles(header, encoded, old, wanted, what))

    def _read(self, block: Block, index: int) -> Bits:
        if index not in self._elements:
            self._elements[index] = self._memory.elements(self._regions[index], block.spec.dtype)
        return self._elements[index]

    def _put_together(self, block: Block, boxes: dict[Box, int]) -> Bits:
        old = np.zeros(block.count, dtypes.by_name(block.spec.dtype).bits)
        for box, index in boxes.items():
            fill(box, self._read(block, index), block.start, old)
        return old


def sound(decode: Callable[[], DecodedBlock]) -> DecodedBlock:
    """What decoding gives of a block whose digest is right: where it fails, it is the old values that are wrong."""
    try:
        return decode()
    except MalformedObject as error:
        raise StateHashMismatch(
            f"{error}: it cannot be decoded against the live weights, so they are not those of the version before; "
            "nothing was written"
        ) from None


def window_of(
    header: CtxHeader, start: int, regions: Sequence[Region], held: Sequence[int]
) -> tuple[CtxWindow, int, int] | None:
    """The columns of a block's rows that the regions `held` of its tensor hold, where one region holds them all.

    Returns them with that region and the rank of the first among its elements; None where several regions do, or other
    columns of other rows, or parts of tiles.
    """
    boxes = _boxes(regions, held)
    if len(boxes) != 1:
        return None
    ((box, index),) = boxes.items()
    found = columns_of(box, start, header.grid.rows, header.grid.row_length)
    window = header.window(found.first, found.count) if found is not None else None
    return None if found is None or window is None else (window, index, found.rank)


def _boxes(regions: Sequence[Region], held: Sequence[int]) -> dict[Box, int]:
    """What regions hold, and by which of them, for two may hold the same."""
    boxes: dict[Box, int] = {}
    for index in held:
        boxes.setdefault(regions[index].source, index)
    return boxes


@dataclass(frozen=True, slots=True)
class Columns:
    """What a box holds of a block: the same columns of each of its rows."""

    first: int
    count: int
    rank: int  # of the first element among those of the box


@lru_cache(maxsize=1 << 14)  # as everything here, the same in every version
def columns_of(box: Box, start: int, rows: int, row_length: int) -> Columns | None:
    """Which columns of a block a box holds; None where it holds nothing of it, or other columns of other rows.

    Args:
        start: position in the tensor of the first of the block's `rows` rows of `row_length` elements.
    """
    found: Columns | None = None
    for row in range(0, rows, _ROWS_AT_ONCE):
        some = _columns_of_some(box, start + row * row_length, min(_ROWS_AT_ONCE, rows - row), row_length)
        if some is None or (found is not None and (some.first, some.count) != (found.first, found.count)):
            return None
        found = found or some
    return found


def _columns_of_some(box: Box, start: int, rows: int, row_length: int) -> Columns | None:
    edges = start + row_length * np.arange(rows + 1)
    ranks = box.rank(edges)
    count = int(ranks[1] - ranks[0])
    if not count or (np.diff(ranks) != count).any():
        return None
    firsts, lasts = box.positions(ranks[:-1]) - edges[:-1], box.positions(ranks[1:] - 1) - edges[:-1]
    if (firsts != firsts[0]).any() or (lasts != firsts[0] + count - 1).any():
        return None
    return Columns(int(firsts[0]), count, int(ranks[0]))


def _held_tiles(header: CtxHeader, boxes: tuple[Box, ...], start: int, what: str) -> U8:
    """The tiles that disjoint boxes hold, u8[T]; BaseNeeded if one of those with changes is held in part."""
    held, whole = held_of_tiles(header.grid, boxes, start), header.grid.boxes[:, 1] * header.grid.boxes[:, 3]
    torn = np.flatnonzero((header.sizes > 0) & (held > 0) & (held < whole))
    if torn.size:
        row, rows, column, columns = header.grid.boxes[torn[0]].tolist()
        raise BaseNeeded(
            f"{what}: this rank holds only a part of its tile of rows {row} to {row + rows - 1} and columns "
            f"{column} to {column + columns - 1}, and codec ctx is decoded against all of a tile's old values; "
            "serve with 1, 2, 4, 8 or 16 ranks, or publish without ctx"
        )
    return np.asarray(held == whole, np.uint8)


@lru_cache(maxsize=1 << 12)
def held_of_tiles(grid: CtxGrid, boxes: tuple[Box, ...], start: int) -> I64:
    """How many elements of each tile are in one of the boxes, which are disjoint; int64[T]."""
    found = []
    for (column, columns), height in zip(grid.strips.tolist(), grid.tile_rows.tolist(), strict=True):
        step = height * max(1, _ROWS_AT_ONCE // height)
        for row in range(0, grid.rows, step):
            begins = start + column + grid.row_length * np.arange(row, min(row + step, grid.rows))
            inside = np.zeros(begins.size, np.int64)
            for box in boxes:
                inside += box.rank(begins + columns) - box.rank(begins)
            found.append(np.add.reduceat(inside, np.arange(0, begins.size, height)))
    return np.concatenate(found)


def fill(box: Box, elements: Bits, start: int, old: Bits) -> None:
    """Copy the elements uW[box.numel] of a box to old uW[count], positions start … start+count−1 of a tensor."""
    run, step = (box.sizes[-1], box.strides[-1]) if box.sizes else (1, 1)
    starts = np.array([box.offset], np.int64)
    for size, stride in zip(box.sizes[:-1], box.strides[:-1], strict=True):
        starts = (starts[:, None] + stride * np.arange(size)).reshape(-1)
    span, end = (run - 1) * step + 1, start + old.size
    first, last = np.searchsorted(starts, (start - span + 1, end))  # the runs that reach into the block
    for index in range(int(first), int(last)):
        begin = int(starts[index]) - start
        low, high = max(0, -(begin // step)), min(run, -((begin - old.size) // step))
        places = slice(begin + low * step, begin + (high - 1) * step + 1, step)
        old[places] = elements[index * run + low : index * run + high]
