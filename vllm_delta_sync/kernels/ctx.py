"""Decodes tiles of ctx blocks where their old values lie: on the device, those of many blocks in one launch.

Does not read headers or choose tiles; nothing of the size of a tensor goes to or comes from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import CtxGrid, CtxModel
from vllm_delta_sync.native.ctx_types import CTX_WIDTHS, check_cover, check_sizes, check_stated
from vllm_delta_sync.native.cuda import BLOCK_COLUMNS, CLASS_COLUMNS, TILE_COLUMNS, CudaLibrary
from vllm_delta_sync.native.types import I64, U8, U16, U32, WIDTHS, Bits


@dataclass(frozen=True, eq=False)
class CodedBlock:
    """What `native.ctx_decode` takes, but that the old values are on a device."""

    model: CtxModel
    old: Tensor  # [rows · row_length], contiguous integers of 1, 2 or 4 bytes; right in the wanted tiles
    grid: CtxGrid
    stated: I64  # [T], of each tile bytes << 1 | whether it has four states
    data: U8  # the tiles' bytes
    changed: int  # at most so many
    wanted: U8 | None = None  # [T]; None: all


Decoded = tuple[U32, Bits]  # positions [n], ascending, and new values [n]


def decode(library: CudaLibrary, blocks: Sequence[CodedBlock], stream: int) -> list[Decoded | None]:
    """The changes of the wanted tiles of each block; None where a tile is malformed or they are more than `changed`.

    Waits for the stream, which torch's current one must be. Raises MalformedObject where sizes are not those of the
    data, and CudaError.
    """
    found: list[Decoded | None] = [None] * len(blocks)
    for width in CTX_WIDTHS:
        some = [index for index, block in enumerate(blocks) if block.old.element_size() == width]
        if some:
            launch = Launch([blocks[index] for index in some])
            launch.run(library, stream)
            for index, changes in zip(some, launch.results(), strict=True):
                found[index] = changes
    return found


def decode_on_host(block: CodedBlock) -> Decoded | None:
    """The same of one block by the host, to which its old values are copied."""
    bits = block.old.cpu().numpy()
    old = bits.view(WIDTHS[bits.itemsize])
    try:
        return native.ctx_decode(block.model, old, block.grid, block.stated, block.data, block.changed, block.wanted)
    except MalformedObject:
        return None


class Launch:
    """Blocks whose elements have one width, at least one, with all that decoding them takes on their device."""

    def __init__(self, blocks: Sequence[CodedBlock]) -> None:
        device, kind = blocks[0].old.device, blocks[0].old.dtype
        self._tiles, self._jobs, models = _tables(blocks)
        tables = [part.reshape(-1).view(np.uint8) for part in (self._tiles, self._jobs, models)]
        self._tables = to_device(np.concatenate(tables), device)
        self._data = to_device(np.concatenate([block.data for block in blocks]), device)
        self._tables[: self._tiles.nbytes].view(torch.int64).view(-1, TILE_COLUMNS)[:, 6] += self._data.data_ptr()
        total = int(self._jobs[:, 1].sum())
        self._positions = torch.full(
            (total,), -1, dtype=torch.int32, device=device
        )  # what stays so comes last in order
        self._values = torch.empty(total, dtype=kind, device=device)
        self._outcomes = torch.empty((len(blocks), 2), dtype=torch.int32, device=device)

    def run(self, library: CudaLibrary, stream: int) -> None:
        """Enqueue the kernel."""
        tiles = self._tables.data_ptr()
        jobs = tiles + self._tiles.nbytes
        library.ctx_decode(
            self._values.element_size(), tiles, len(self._tiles), jobs, len(self._jobs), jobs + self._jobs.nbytes,
            self._positions.data_ptr(), self._values.data_ptr(), self._outcomes.data_ptr(), stream,
        )  # fmt: skip

    def results(self) -> list[Decoded | None]:
        """Of each block, in order; waits for the device."""
        device, width = self._values.device, self._values.element_size()
        room = torch.from_numpy(self._jobs[:, 1].copy())
        owner = torch.repeat_interleave(torch.arange(len(self._jobs)), room).to(device)
        order = torch.argsort(owner << 32 | self._positions.to(torch.int64) & 0xFFFFFFFF)
        positions = self._positions[order].cpu().numpy().view(np.uint32)
        values = self._values[order].cpu().numpy().view(WIDTHS[width])
        found: list[Decoded | None] = []
        for first, (count, faults) in zip(self._jobs[:, 0].tolist(), self._outcomes.tolist(), strict=True):
            part = slice(first, first + count)
            found.append(None if faults else (positions[part], values[part]))
        return found


def _tables(blocks: Sequence[CodedBlock]) -> tuple[I64, I64, U16]:
    """Rows of TileJob, with offsets in place of addresses of data, of BlockJob and of ClassRow (csrc/ctx_team.h)."""
    models: dict[int, tuple[int, CtxModel]] = {}  # by identity: blocks of a version share them
    tiles, jobs = [np.empty((0, TILE_COLUMNS), np.int64)], np.zeros((len(blocks), BLOCK_COLUMNS), np.int64)
    first = classes = offset = 0
    for index, block in enumerate(blocks):
        check_cover(block.grid)
        check_stated(block.grid, block.stated, block.data, block.wanted)
        sizes = check_sizes(block.stated, block.data)
        if id(block.model) not in models:
            models[id(block.model)] = classes, block.model
            classes += block.model.last.size
        chosen = np.flatnonzero(sizes if block.wanted is None else sizes * (block.wanted != 0))
        rows = np.empty((chosen.size, TILE_COLUMNS), np.int64)
        rows[:, 0], rows[:, 1] = block.old.data_ptr(), block.grid.row_length
        rows[:, 2:6] = block.grid.boxes[chosen]
        rows[:, 6] = offset + (np.cumsum(sizes) - sizes)[chosen]
        rows[:, 7] = block.stated[chosen]
        rows[:, 8] = index
        tiles.append(rows)
        jobs[index] = first, block.changed, models[id(block.model)][0], block.model.last.size
        first += block.changed
        offset += block.data.size
    table = np.empty((classes, CLASS_COLUMNS), np.uint16)
    for at, model in models.values():
        part = table[at : at + model.last.size]
        part[:, :-1], part[:, -1] = np.concatenate([model.gaps, model.steps], axis=1), model.last
    return np.concatenate(tiles), jobs, table
