"""Blocks of the `ctx` codec: making models, and coding changes against the values that they change.

Does not choose between codecs (`codecs` does), nor hold models: a version's table does. docs/protocol.md, *ctx*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native import Changes, CtxGrid, CtxModel
from vllm_delta_sync.native.ctx_types import GAP_ESCAPE, GAP_SYMBOLS, MANY_LANES, STEP_ESCAPE, STEP_SYMBOLS, TOTAL
from vllm_delta_sync.wire import ctx_model, ctx_tiles, dtypes
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.tensors import TensorSpec

SAMPLES = 32  # blocks that a model is made from, at most
SURVEYED = 16  # one in so many of their elements is looked at to make classes of contexts
CLASS_BITS, END_BITS = 500.0, 5.0  # what a class costs, about: once for its frequencies, and its end in every tile


class _Tensors(Protocol):
    @property
    def spec(self) -> TensorSpec: ...


T = TypeVar("T", bound=_Tensors)
Bits = npt.NDArray[Any]  # unsigned integers of a dtype's width


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
    sizes: npt.NDArray[np.int64]  # bytes of each tile
    lanes: npt.NDArray[np.uint8]  # states of each tile


def chosen(blocks: Sequence[T]) -> Sequence[T]:
    """Those of the changed blocks of a dtype, in the order of their tensors' names, that a model is made from."""
    return blocks[:: -(-len(blocks) // SAMPLES)] if blocks else blocks


def make_models(blocks: Sequence[T], sample: Callable[[T], Sample]) -> dict[str, CtxModel]:
    """A model for each dtype of half floats among the changed blocks of a version, in their order in its table.

    Args:
        blocks: whatever has a `spec`.
        sample: what is asked for of those that are chosen, twice, so that only one needs to be in memory at a time.
    """
    by_dtype: dict[str, list[T]] = {}
    for block in blocks:
        if dtypes.by_name(block.spec.dtype).half:
            by_dtype.setdefault(block.spec.dtype, []).append(block)
    models = {}
    for dtype, group in by_dtype.items():
        some = chosen(group)
        models[dtype] = make_model(partial(map, sample, some), len(some) / len(group))
    return models


def make_model(samples: Callable[[], Iterator[Sample]], share: float) -> CtxModel:
    """A model for blocks of half floats, from contexts of some elements and a quarter of the tiles of the samples.

    Args:
        samples: gives the chosen blocks; asked twice, so that only one needs to be in memory at a time.
        share: of all blocks that the samples are.
    """
    contexts, tiles = native.Tally.of_contexts(), 0
    for sample in samples():
        tiles += _grid(sample.spec, sample.start, sample.old.size, sample.dim).tiles
        # The first of every block: for contexts one place is as good as another.
        count = -(-sample.old.size // SURVEYED)
        part = _between(sample.changes, 0, count)
        native.ctx_survey(sample.old[:count], part.old, part.new, contexts)
    last = ctx_model.classes(contexts.gaps, contexts.steps, (CLASS_BITS * share + END_BITS * tiles) / SURVEYED)
    flat = np.zeros((last.size, STEP_SYMBOLS), np.uint16)
    flat[:, 0] = TOTAL
    classes, found = native.ctx_model(last, flat[:, :GAP_SYMBOLS], flat), native.Tally.of_classes(last.size)
    for index, sample in enumerate(samples()):
        grid = _grid(sample.spec, sample.start, sample.old.size, sample.dim)
        strips = grid.strips[index % 4 :: 4] if len(grid.strips) > 4 else grid.strips[:1]
        native.ctx_tally(classes, sample.old, CtxGrid(grid.rows, grid.row_length, strips.copy()), sample.changes, found)
    gaps, steps = ctx_model.frequencies(found.gaps, GAP_ESCAPE), ctx_model.frequencies(found.steps, STEP_ESCAPE)
    return native.ctx_model(last, gaps, steps)


def _between(changes: Changes, first: int, last: int) -> Changes:
    low, high = np.searchsorted(changes.positions, np.array((first, last), np.uint32))
    return Changes(*(column[low:high] for column in changes))


def _grid(spec: TensorSpec, start: int, count: int, dim: int) -> CtxGrid:
    return ctx_tiles.grid(spec.shape, start, count, dim, _band(spec, dim))


def _band(spec: TensorSpec, dim: int) -> int:
    return ctx_tiles.band_of(spec.shape[dim] if spec.shape else 1)


def encode(
    model: CtxModel, spec: TensorSpec, start: int, old: Bits, changes: Changes, dim: int, room: int
) -> tuple[bytes, npt.NDArray[np.uint8]] | None:
    """The index stream and the tiles of a block, or None if the tiles take more than `room` bytes."""
    coded = native.ctx_encode(model, old, _grid(spec, start, old.size, dim), changes, room)
    if coded is None:
        return None
    data, sizes, lanes = coded
    head = bytearray((dim,))
    for value in (_band(spec, dim), *(sizes << 1 | (lanes == MANY_LANES)).tolist()):
        while value >= 0x80:
            head.append(value & 0x7F | 0x80)
            value >>= 7
        head.append(value)
    return bytes(head), data


def read_header(spec: TensorSpec, start: int, count: int, index: Buffer, size: int) -> CtxHeader:
    """Read the index stream of a block whose tiles take `size` bytes; MalformedObject if it is not one."""
    values = _varints(index[1:])
    if not values:
        raise MalformedObject(f"a ctx index stream of {len(index)} bytes")
    grid = ctx_tiles.grid(spec.shape, start, count, index[0], values[0])
    if len(values) != grid.tiles + 1:
        raise MalformedObject(
            f"a ctx index stream of {len(values) - 1} tiles, where the block is cut into {grid.tiles}"
        )
    stated = np.array(values[1:], np.int64)
    sizes, lanes = stated >> 1, np.where(stated & 1, MANY_LANES, 1).astype(np.uint8)
    if (total := int(sizes.sum())) != size:
        raise MalformedObject(f"ctx tiles of {total} bytes in a stream of {size}")
    return CtxHeader(grid, sizes, lanes)


def _varints(data: Buffer) -> list[int]:
    """LEB128 numbers below 2**28; MalformedObject for larger ones, or one that is cut off."""
    found, value, shift = [], 0, 0
    for byte in bytes(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(value)
            value = shift = 0
        elif shift == 28:
            raise MalformedObject("a ctx index stream with a number of 2**28 or more")
    if shift:
        raise MalformedObject("a ctx index stream that ends inside a number")
    return found
