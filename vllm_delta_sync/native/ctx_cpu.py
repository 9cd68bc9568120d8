"""The `ctx` codec's loops on the C library (csrc/cpu/ctx.cpp): checks arguments, then hands over addresses.

Does not choose tiles or models; `wire` does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.cpu import _lib
from vllm_delta_sync.native.ctx_types import (
    CtxGrid,
    CtxModel,
    Tally,
    check_block,
    check_changes,
    check_cover,
    check_model,
    check_stated,
    malformed,
    unsorted,
)
from vllm_delta_sync.native.types import I64, U8, U16, U32, Bits, Changes, address_of, pair_width, row

_UNSORTED, _NO_MEMORY = -3, -4  # enum Refusal of csrc/cpu/ctx.cpp
_REFUSALS = {
    1: "ends early",
    2: "has bytes left over",
    3: "has a number of 2**28 or more",
    4: "does not add up to the bytes of the tiles",
}


class _Job(ctypes.Structure):
    """Job of csrc/cpu/ctx_job.h. Addresses as numbers."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "width", "model", "old", "grid", "memory", "size", "n", "positions", "before", "after", "room",
            "index_size", "stated", "wanted", "data", "data_size", "gaps", "steps",
        )
    )  # fmt: skip
    width: int
    model: int
    old: int
    grid: int
    memory: int
    size: int
    n: int
    positions: int
    before: int
    after: int
    room: int
    index_size: int
    stated: int
    wanted: int
    data: int
    data_size: int
    gaps: int
    steps: int


class _Worker(threading.local):
    """A thread's job, and the memory for it, which grows to what the largest block took: fresh pages cost much."""

    def __init__(self) -> None:
        self.job = _Job()
        self._address = ctypes.addressof(self.job)

    def block(self, model: CtxModel, old: Bits, grid: CtxGrid) -> _Job:
        """The job, for this block."""
        job, width = self.job, check_block(grid, old)
        job.width, job.model, job.old, job.grid = width, model.address, address_of(old), grid.address
        return job

    def changes(self, changes: Changes) -> None:
        """Give the job its changes."""
        job, (positions, before, after) = self.job, changes
        job.n, job.positions = positions.size, address_of(positions)
        job.before, job.after = address_of(before), address_of(after)

    def run(self, function: Callable[[int], int]) -> int:
        """What a function of the library returns for the job when there is enough memory."""
        outcome = function(self._address)
        if outcome == _NO_MEMORY:
            job = self.job
            # There is none while the smaller one goes and the larger one comes: so what fails here leaves none.
            job.size = 0
            self._bytes = np.empty(0, np.uint8)
            self._bytes = np.empty(_lib.vds_ctx_memory(self._address), np.uint8)
            job.memory = address_of(self._bytes)
            job.size = self._bytes.size
            outcome = function(self._address)
        return outcome


_worker = _Worker()


def ctx_model(last: U8, gaps: U16, steps: U16) -> CtxModel:
    """Classes that end at contexts `last` u8 [C], with frequencies u16 [C, 74] and [C, 249]; MalformedObject if not."""
    check_model(last, gaps, steps)
    gaps, steps = np.ascontiguousarray(gaps, np.uint16), np.ascontiguousarray(steps, np.uint16)
    prepared = np.empty(_lib.vds_ctx_model_size(last.size), np.uint8)
    status = _lib.vds_ctx_model(
        last.size, address_of(last), address_of(gaps), address_of(steps), address_of(prepared)
    )  # fmt: skip
    assert status == 0, "the model was checked"
    return CtxModel(last, gaps, steps, prepared, address_of(prepared))


def ctx_encode(model: CtxModel, old: Bits, grid: CtxGrid, changes: Changes, room: int) -> tuple[bytes, bytes] | None:
    """What the index states of the tiles (docs/protocol.md, *ctx*), and their bytes; None if they take over `room`.

    old uW [rows · row_length] before the changes; room in bytes.
    """
    worker = _worker
    job = worker.block(model, old, grid)
    check_cover(grid)
    check_changes(old, changes)
    worker.changes(changes)
    job.room = room
    size = worker.run(_lib.vds_ctx_encode)
    if size == _UNSORTED:
        raise unsorted(grid)
    if size < 0:
        return None
    index = job.memory + (room + 63) // 64 * 64
    return ctypes.string_at(index, job.index_size), ctypes.string_at(job.memory, size)


def ctx_index(index: U8, tiles: int, size: int) -> I64:
    """What an index states of so many tiles, `size` bytes together, as `ctx_decode` wants it, i64 [T].

    MalformedObject if it is not exactly that.
    """
    row("index", index, np.uint8)
    stated = np.empty(tiles, np.int64)
    status = _lib.vds_ctx_read_index(address_of(index), index.size, address_of(stated), tiles, size)
    if status:
        raise MalformedObject(f"a ctx index stream of {tiles} tiles {_REFUSALS[status]}")
    return stated


def ctx_decode(
    model: CtxModel, old: Bits, grid: CtxGrid, stated: I64, data: U8, changed: int, wanted: U8 | None = None
) -> tuple[U32, Bits]:
    """The changes of the wanted tiles, at most `changed`: positions u32 [n], ascending, and new values uW [n].

    old uW [rows · row_length] is right in those tiles and may be anything elsewhere. Of each tile, i64 and u8 [T]:
    bytes << 1 | whether it has four states is `stated`, whether it is `wanted`; all are if that is None.
    MalformedObject if the bytes of a wanted tile are not exactly what docs/protocol.md says.
    """
    worker = _worker
    job = worker.block(model, old, grid)
    check_cover(grid)
    check_stated(grid, stated, data, wanted)
    room = max(0, changed)
    positions, values = np.empty(room, np.uint32), np.empty(room, old.dtype)
    job.n, job.positions, job.after, job.room = room, address_of(positions), address_of(values), 0
    job.stated, job.data, job.data_size = address_of(stated), address_of(data), data.size
    job.wanted = 0 if wanted is None else address_of(wanted)
    found = worker.run(_lib.vds_ctx_decode)
    if found < 0:
        raise malformed(grid, changed)
    return (positions, values) if found == room else (positions[:found], values[:found])


def ctx_tally(model: CtxModel, old: Bits, grid: CtxGrid, changes: Changes, to: Tally) -> None:
    """Add the symbols of the changes in the grid's strips, by class of the model; its tiles' ends among them."""
    worker = _worker
    job = worker.block(model, old, grid)
    check_changes(old, changes)
    worker.changes(changes)
    job.room, job.gaps, job.steps = 0, address_of(to.gaps), address_of(to.steps)
    status = worker.run(_lib.vds_ctx_tally)
    if status == _UNSORTED:
        raise unsorted(grid)


def ctx_survey(old: Bits, before: Bits, after: Bits, to: Tally) -> None:
    """Add elements of old uW [N] by context, and step symbols of before → after uW [n] by the context of `before`."""
    width = pair_width("before", before, "after", after)
    _lib.vds_ctx_survey(
        width, address_of(old), old.size, address_of(before), address_of(after), before.size, address_of(to.gaps),
        address_of(to.steps),
    )  # fmt: skip
