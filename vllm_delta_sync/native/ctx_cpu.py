"""The `ctx` codec's loops on the C library (csrc/cpu/ctx.cpp): checks arguments, then hands over addresses.

Does not choose tiles or models; `wire` does.
"""

from __future__ import annotations

import threading

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.cpu import _lib
from vllm_delta_sync.native.ctx_types import (
    MANY_LANES,
    CtxGrid,
    CtxModel,
    Tally,
    check_block,
    check_changes,
    check_cover,
    check_model,
    check_sizes,
    unsorted,
)
from vllm_delta_sync.native.types import I64, U8, U16, U32, Bits, Changes, pair_width

UNSORTED = -3  # enum Refusal of csrc/cpu/ctx.cpp


class _Memory(threading.local):
    """Of a thread; it grows to what the largest block took, for fresh pages cost much."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self.address = 0

    def reserve(self, size: int) -> int:
        """The address of so many bytes."""
        if self.bytes.size < size:
            self.bytes = np.empty(size, np.uint8)
            self.address = int(self.bytes.ctypes.data)
        return self.address


_memory = _Memory()


def _scratch_size(grid: CtxGrid, changed: int) -> int:
    return int(_lib.vds_ctx_scratch_size(grid.elements, len(grid.strips), grid.tiles, changed))


def ctx_model(last: U8, gaps: U16, steps: U16) -> CtxModel:
    """Classes that end at contexts `last` u8 [C], with frequencies u16 [C, 74] and [C, 249]; MalformedObject if not."""
    check_model(last, gaps, steps)
    gaps, steps = np.ascontiguousarray(gaps, np.uint16), np.ascontiguousarray(steps, np.uint16)
    prepared = np.empty(_lib.vds_ctx_model_size(last.size), np.uint8)
    status = _lib.vds_ctx_model(
        last.size, last.ctypes.data, gaps.ctypes.data, steps.ctypes.data, prepared.ctypes.data
    )  # fmt: skip
    assert status == 0, "the model was checked"
    return CtxModel(last, gaps, steps, prepared, int(prepared.ctypes.data))


def ctx_encode(model: CtxModel, old: Bits, grid: CtxGrid, changes: Changes, room: int) -> tuple[U8, I64, U8] | None:
    """The tiles' bytes u8 [·], and of each tile its bytes i64 [T] and states u8 [T]; None if they take over `room`.

    old uW [rows · row_length] before the changes; room in bytes.
    """
    width = check_block(grid, old)
    check_cover(grid)
    check_changes(old, changes)
    spans, scratch = np.zeros((grid.tiles, 2), np.int64), _scratch_size(grid, changes.positions.size)
    memory = _memory.reserve(scratch + room)
    size = _lib.vds_ctx_encode(
        width, model.address, old.ctypes.data, grid.rows, grid.row_length, grid.address, len(grid.strips),
        changes.positions.ctypes.data, changes.old.ctypes.data, changes.new.ctypes.data, changes.positions.size,
        memory, memory + scratch, room, spans.ctypes.data,
    )  # fmt: skip
    if size == UNSORTED:
        raise unsorted(grid)
    if size < 0:
        return None
    return (
        _memory.bytes[scratch : scratch + size].copy(),
        np.ascontiguousarray(spans[:, 0]),
        spans[:, 1].astype(np.uint8),
    )


def ctx_decode(
    model: CtxModel, old: Bits, grid: CtxGrid, sizes: I64, lanes: U8, data: U8, wanted: U8, changed: int
) -> tuple[U32, Bits]:
    """The changes of the wanted tiles, at most `changed`: positions u32 [n], ascending, and steps uW [n].

    old uW [rows · row_length] is right in those tiles and may be anything elsewhere. sizes i64, lanes and wanted u8,
    all [T]. MalformedObject if the bytes of a wanted tile are not exactly what docs/protocol.md says.
    """
    width = check_block(grid, old)
    check_cover(grid)
    check_sizes(grid, sizes, lanes, data, wanted)
    positions, steps = np.empty(max(0, changed), np.uint32), np.empty(max(0, changed), old.dtype)
    stated = sizes << 1 | (lanes == MANY_LANES)
    found = _lib.vds_ctx_decode(
        width, model.address, old.ctypes.data, grid.rows, grid.row_length, grid.address, len(grid.strips),
        stated.ctypes.data, wanted.ctypes.data, data.ctypes.data, _memory.reserve(_scratch_size(grid, positions.size)),
        positions.ctypes.data, steps.ctypes.data, positions.size,
    )  # fmt: skip
    if found < 0:
        raise MalformedObject(f"a ctx tile of {grid.tiles} is malformed, or they hold more than {changed} changes")
    return positions[:found], steps[:found]


def ctx_tally(model: CtxModel, old: Bits, grid: CtxGrid, changes: Changes, to: Tally) -> None:
    """Add the symbols of the changes in the grid's strips, by class of the model; its tiles' ends among them."""
    width = check_block(grid, old)
    check_changes(old, changes)
    status = _lib.vds_ctx_tally(
        width, model.address, old.ctypes.data, grid.rows, grid.row_length, grid.address, len(grid.strips),
        changes.positions.ctypes.data, changes.old.ctypes.data, changes.new.ctypes.data, changes.positions.size,
        _memory.reserve(_scratch_size(grid, changes.positions.size)), to.gaps.ctypes.data, to.steps.ctypes.data,
    )  # fmt: skip
    if status == UNSORTED:
        raise unsorted(grid)


def ctx_survey(old: Bits, before: Bits, after: Bits, to: Tally) -> None:
    """Add elements of old uW [N] by context, and step symbols of before → after uW [n] by the context of `before`."""
    width = pair_width("before", before, "after", after)
    _lib.vds_ctx_survey(
        width, old.ctypes.data, old.size, before.ctypes.data, after.ctypes.data, before.size, to.gaps.ctypes.data,
        to.steps.ctypes.data,
    )  # fmt: skip
