"""Decodes tiles of ctx blocks where their old values lie: on the device, those of many blocks in one launch.

Does not read headers, choose tiles or apply steps; nothing of the size of a tensor goes to or comes from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import CtxGrid, CtxModel
from vllm_delta_sync.native.ctx_types import CTX_WIDTHS, MANY_LANES, check_cover, check_sizes
from vllm_delta_sync.native.cuda import BLOCK_COLUMNS, CLASS_COLUMNS, TILE_COLUMNS, CudaLibrary
from vllm_delta_sync.native.types import I64, U8, U16, U32, WIDTHS, Bits


@dataclass(frozen=True, eq=False)
class CodedBlock:
    """What `native.ctx_decode` takes, but that the old values are on a device."""

    model: CtxModel
    old: Tensor  # [rows · row_length], contiguous integers of 1, 2 or 4 bytes; right in the wanted tiles
    grid: CtxGrid
    sizes: I64  # [T], bytes of each tile
    lanes: U8  # [T], states of each tile
    data: U8  # the tiles' bytes
    wanted: U8  # [T]
    changed: int  # at most so many


Decoded = tuple[U32, Bits]  # positions [n], ascending, and steps [n]


def decode(library: CudaLibrary, blocks: Sequence[CodedBlock], stream: int) -> list[Decoded | None]:
    """The changes of the wanted tiles of each block; None where a tile is malformed or they are more than `changed`.

    Waits for the stream, which torch's current one must be. Raises MalformedObject where sizes are not those of the
    data, and CudaError.
    """
    found: list[Decoded | None] = [None] * len(blocks)
    for width in CTX_WIDTHS:
        some = [index for index, block in enumerate(blocks) if block.old.element_size() == width]
        if some:
            for index, changes in zip(some, _launch(library, width, [blocks[i] for i in some], stream), strict=True):
                found[index] = changes
    return found


def _launch(library: CudaLibrary, width: int, blocks: Sequence[CodedBlock], stream: int) -> list[Decoded | None]:
    """Those whose elements have one width."""
    device, kind = blocks[0].old.device, blocks[0].old.dtype
    tiles, jobs, models = _tables(blocks)
    data = np.concatenate([block.data for block in blocks])
    addresses = to_device(np.concatenate([part.reshape(-1).view(np.uint8) for part in (tiles, jobs, models)]), device)
    bytes_ = to_device(data, device)
    rows = addresses[: tiles.nbytes].view(torch.int64).view(-1, TILE_COLUMNS)
    rows[:, 6] += bytes_.data_ptr()
    total = int(jobs[:, 1].sum())
    positions = torch.full((total,), -1, dtype=torch.int32, device=device)  # what stays so comes last in order
    steps = torch.empty(total, dtype=kind, device=device)
    outcomes = torch.empty((len(blocks), 2), dtype=torch.int32, device=device)
    at = addresses.data_ptr()
    library.ctx_decode(
        width, at, len(tiles), at + tiles.nbytes, len(blocks), at + tiles.nbytes + jobs.nbytes, positions.data_ptr(),
        steps.data_ptr(), outcomes.data_ptr(), stream,
    )  # fmt: skip
    room = torch.from_numpy(jobs[:, 1].copy())
    owner = torch.repeat_interleave(torch.arange(len(blocks)), room).to(device)
    order = torch.argsort(owner << 32 | positions.to(torch.int64) & 0xFFFFFFFF)
    places = positions[order].cpu().numpy().view(np.uint32)
    moved = steps[order].cpu().numpy().view(WIDTHS[width])
    results: list[Decoded | None] = []
    for (first, _, _, _), (count, faults) in zip(jobs.tolist(), outcomes.tolist(), strict=True):
        part = slice(first, first + count)
        results.append(None if faults else (places[part], moved[part]))
    return results


def _tables(blocks: Sequence[CodedBlock]) -> tuple[I64, I64, U16]:
    """Rows of TileJob, with offsets in place of addresses of data, of BlockJob and of ClassRow (csrc/ctx_decode.h)."""
    models: dict[int, tuple[int, CtxModel]] = {}  # by identity: blocks of a version share them
    tiles, jobs = [np.empty((0, TILE_COLUMNS), np.int64)], np.zeros((len(blocks), BLOCK_COLUMNS), np.int64)
    first = classes = offset = 0
    for index, block in enumerate(blocks):
        check_cover(block.grid)
        check_sizes(block.grid, block.sizes, block.lanes, block.data, block.wanted)
        if id(block.model) not in models:
            models[id(block.model)] = classes, block.model
            classes += block.model.last.size
        chosen = np.flatnonzero((block.sizes > 0) & (block.wanted != 0))
        rows = np.empty((chosen.size, TILE_COLUMNS), np.int64)
        rows[:, 0], rows[:, 1] = block.old.data_ptr(), block.grid.row_length
        rows[:, 2:6] = block.grid.boxes[chosen]
        rows[:, 6] = offset + (np.cumsum(block.sizes) - block.sizes)[chosen]
        rows[:, 7] = (block.sizes << 1 | (block.lanes == MANY_LANES))[chosen]
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
