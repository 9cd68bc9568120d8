"""Blocks of the `ctx` codec: making models, and coding changes against the values that they change.

Does not choose between codecs (`codecs` does), nor hold models: a version's table does. docs/protocol.md, *ctx*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native import Changes, CtxGrid, CtxModel
from vllm_delta_sync.native.ctx_types import (
    CTX_WIDTHS,
    GAP_END,
    GAP_ESCAPE,
    GAP_SYMBOLS,
    STEP_ESCAPE,
    STEP_SYMBOLS,
    TOTAL,
)
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import ctx_model, ctx_tiles, dtypes
from vllm_delta_sync.wire.ctx_model import CLASS_BITS, END_BITS
from vllm_delta_sync.wire.ctx_order import pattern
from vllm_delta_sync.wire.dtypes import Dtype
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.tensors import TensorSpec

SAMPLES = 32  # blocks that a model is made from, at most
SURVEYED = 16  # one in so many of their elements is looked at to make classes of contexts


class _Tensors(Protocol):
    @property
    def spec(self) -> TensorSpec: ...


T = TypeVar("T", bound=_Tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A block whose changes a model is made from."""

    spec: TensorSpec
    start: int  # elements
    old: Bits  # uW[count]
    changes: Changes  # positions within the block
    dim: int  # in bands of which the tensor is cut


@dataclass(frozen=True, slots=True, eq=False)
class CtxHeader:
    """The index stream of a block, read."""

    grid: CtxGrid
    dtype: Dtype
    stated: npt.NDArray[np.int64]  # of each tile: bytes << 1 | whether it has four states

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each tile."""
        return self.stated >> 1

    def window(self, first: int, columns: int) -> CtxWindow | None:
        """The tiles in these columns of every row; None where other tiles reach into them."""
        found = _cut_out(self.grid, first, columns)
        if found is None:
            return None
        grid, tiles = found
        begin, size = int(self.sizes[: tiles.start].sum()), int(self.sizes[tiles].sum())
        header = CtxHeader(grid, self.dtype, self.stated[tiles])
        return CtxWindow(header, first, self.grid.row_length, slice(begin, begin + size))


@dataclass(frozen=True, slots=True, eq=False)
class CtxWindow:
    """Some columns of a block, seen as a block of their own."""

    header: CtxHeader  # of these columns alone
    first: int  # the first of them
    row_length: int  # elements of a row of the whole block
    data: slice  # where in the value stream the tiles are

    def in_block(self, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Positions u32[n] within these columns as positions in the block."""
        columns, skipped = self.header.grid.row_length, self.row_length - self.header.grid.row_length
        if self.header.grid.rows > 1 and skipped:
            positions = positions + positions // np.uint32(columns) * np.uint32(skipped)
        return positions + np.uint32(self.first) if self.first else positions


@lru_cache(maxsize=1 << 10)  # a server's parts of blocks are the same in every version
def _cut_out(grid: CtxGrid, first: int, columns: int) -> tuple[CtxGrid, slice] | None:
    """The strips that make up these columns as a grid, and which of the tiles are theirs."""
    begins, ends = grid.strips[:, 0], grid.strips.sum(axis=1)
    inside = np.flatnonzero((begins >= first) & (ends <= first + columns))
    if not inside.size or begins[inside[0]] != first or ends[inside[-1]] != first + columns:
        return None
    low, high = int(inside[0]), int(inside[-1]) + 1
    if high - low == len(grid.strips):
        return grid, slice(0, grid.tiles)
    part = CtxGrid(grid.rows, columns, grid.strips[low:high] - np.array((first, 0)))
    skipped = CtxGrid(grid.rows, grid.row_length, grid.strips[:low]).tiles
    return part, slice(skipped, skipped + part.tiles)


def chosen(blocks: Sequence[T]) -> Sequence[T]:
    """Those of the changed blocks of a dtype, in the order of their tensors' names, that a model is made from."""
    return blocks[:: -(-len(blocks) // SAMPLES)] if blocks else blocks


def make_models(blocks: Sequence[T], sample: Callable[[T], Sample]) -> dict[str, CtxModel]:
    """A model for each dtype among the changed blocks of a version, in their order in its table.

    There is none for dtypes of 8 bytes.

    Args:
        blocks: whatever has a `spec`.
        sample: what is asked for of those that are chosen, twice, so that only one needs to be in memory at a time.
    """
    by_dtype: dict[str, list[T]] = {}
    for block in blocks:
        if block.spec.width in CTX_WIDTHS:
            by_dtype.setdefault(block.spec.dtype, []).append(block)
    models = {}
    for dtype, group in by_dtype.items():
        some = chosen(group)
        models[dtype] = make_model(partial(map, sample, some), len(some) / len(group))
    return models


def make_model(samples: Callable[[], Iterator[Sample]], share: float) -> CtxModel:
    """A model for blocks of one dtype, from contexts of some elements and a quarter of the tiles of the samples.

    Args:
        samples: gives the chosen blocks; asked twice, so that only one needs to be in memory at a time.
        share: of all blocks that the samples are.
    """
    contexts, tiles = native.Tally.of_contexts(), 0
    for sample in map(_seen, samples()):
        tiles += _grid(sample.spec, sample.start, sample.old.size, sample.dim).tiles
        # The first of every block: for contexts one place is as good as another.
        count = -(-sample.old.size // SURVEYED)
        part = _between(sample.changes, 0, count)
        native.ctx_survey(sample.old[:count], part.old, part.new, contexts)
    last = ctx_model.classes(contexts.gaps, contexts.steps, (CLASS_BITS * share + END_BITS * tiles) / SURVEYED)
    flat = np.zeros((last.size, STEP_SYMBOLS), np.uint16)
    flat[:, 0] = TOTAL
    classes, found = native.ctx_model(last, flat[:, :GAP_SYMBOLS], flat), native.Tally.of_classes(last.size)
    for index, sample in enumerate(map(_seen, samples())):
        some = _quarter(_grid(sample.spec, sample.start, sample.old.size, sample.dim), index % 4)
        native.ctx_tally(classes, sample.old, some, sample.changes, found)
    # Where changes are few, none may be in what was sampled, and so no end of a tile.
    gaps = ctx_model.frequencies(found.gaps, GAP_END, GAP_ESCAPE)
    return native.ctx_model(last, gaps, ctx_model.frequencies(found.steps, STEP_ESCAPE))


@lru_cache(maxsize=1 << 8)  # the same in every version
def _quarter(grid: CtxGrid, first: int) -> CtxGrid:
    """Each fourth strip, but one at least."""
    strips = grid.strips[first::4] if len(grid.strips) > 4 else grid.strips[:1]
    return CtxGrid(grid.rows, grid.row_length, strips.copy())


def _seen(sample: Sample) -> Sample:
    """As patterns."""
    dtype = dtypes.by_name(sample.spec.dtype)
    return replace(sample, old=pattern(dtype, sample.old), changes=_patterns(dtype, sample.changes))


def _patterns(dtype: Dtype, changes: Changes) -> Changes:
    return Changes(changes.positions, pattern(dtype, changes.old), pattern(dtype, changes.new))


def _between(changes: Changes, first: int, last: int) -> Changes:
    low, high = np.searchsorted(changes.positions, np.array((first, last), np.uint32))
    return Changes(*(column[low:high] for column in changes))


def _grid(spec: TensorSpec, start: int, count: int, dim: int) -> CtxGrid:
    return ctx_tiles.grid(spec.shape, start, count, dim, _band(spec, dim))


def _band(spec: TensorSpec, dim: int) -> int:
    return ctx_tiles.band_of(spec.shape[dim], math.prod(spec.shape[dim + 1 :])) if spec.shape else 1


def encode(
    model: CtxModel, spec: TensorSpec, start: int, old: Bits, changes: Changes, dim: int, room: int
) -> tuple[bytes, bytes] | None:
    """The index stream and the tiles of a block, or None if the tiles take more than `room` bytes."""
    dtype = dtypes.by_name(spec.dtype)
    grid = _grid(spec, start, old.size, dim)
    if dtype.integer:
        old, changes = pattern(dtype, old), _patterns(dtype, changes)
    coded = native.ctx_encode(model, old, grid, changes, room)
    return None if coded is None else (bytes((dim,)) + _varint(_band(spec, dim)) + coded[0], coded[1])


@lru_cache(maxsize=1 << 10)
def _varint(value: int) -> bytes:
    """A number as LEB128."""
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7) if value >= 0x80 else bytes((value,))


def read_header(spec: TensorSpec, start: int, count: int, index: Buffer, size: int) -> CtxHeader:
    """Read the index stream of a block whose tiles take `size` bytes; MalformedObject if it is not one."""
    band, at = _first_varint(index)
    grid = ctx_tiles.grid(spec.shape, start, count, index[0], band)
    stated = native.ctx_index(np.frombuffer(index, np.uint8)[at:], grid.tiles, size)
    return CtxHeader(grid, dtypes.by_name(spec.dtype), stated)


def _first_varint(index: Buffer) -> tuple[int, int]:
    """The LEB128 number below 2**28 that follows the first byte, and where it ends; MalformedObject if none does."""
    value = 0
    for at in range(1, min(len(index), 5)):
        value |= (index[at] & 0x7F) << 7 * (at - 1)
        if index[at] < 0x80:
            return value, at + 1
    raise MalformedObject(f"a ctx index stream of {len(index)} bytes that does not state its bands")
