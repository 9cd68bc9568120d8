"""Decodes the tiles of ctx blocks that one rank holds, against the old values in its live memory.

Reads live memory, writes none. Does not fetch, and does not know what becomes of the changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import BaseNeeded
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.serving.affine import Box, Region
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.wire import dtypes
from vllm_delta_sync.wire.codecs import DecodedBlock, ctx_header, decode_tiles, encoded_of
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block

Flags = npt.NDArray[np.uint8]


class TileReader:
    """Decodes ctx blocks, which come tensor by tensor; keeps what it read of the last tensor only.

    Args:
        regions: the rank's layout.
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
            DigestMismatch, MalformedObject: the block is not what its table states.
        """
        what = f"block {block}"
        encoded = encoded_of(block, payload)
        header = ctx_header(block.spec, block.start, block.count, encoded, what)
        old, have = self._old(block, held)
        grid = have.reshape(header.grid.rows, header.grid.row_length)
        wanted = np.zeros(header.grid.tiles, np.uint8)
        for tile, (row, rows, column, columns) in enumerate(header.grid.boxes.tolist()):
            part = grid[row : row + rows, column : column + columns]
            if not header.sizes[tile] or not part.any():
                continue
            if not part.all():
                raise BaseNeeded(
                    f"{what}: this rank holds only a part of its tile of rows {row} to {row + rows - 1} and columns "
                    f"{column} to {column + columns - 1}, and codec ctx is decoded against all of a tile's old values; "
                    "serve with 1, 2, 4, 8 or 16 ranks, or publish without ctx"
                )
            wanted[tile] = 1
        return decode_tiles(header, encoded, old, wanted, what)

    def _old(self, block: Block, held: Sequence[int]) -> tuple[Bits, Flags]:
        """A block's bits uW[count], and which of them, u8[count], are known."""
        if block.spec.name != self._tensor:
            self._tensor, self._elements = block.spec.name, {}
        old = np.zeros(block.count, dtypes.by_name(block.spec.dtype).bits)
        have = np.zeros(block.count, np.uint8)
        for index in held:
            region = self._regions[index]
            if index not in self._elements:
                self._elements[index] = self._memory.elements(region, block.spec.dtype)
            fill(region.source, self._elements[index], block.start, old, have)
        return old, have


def fill(box: Box, elements: Bits, start: int, old: Bits, have: Flags) -> None:
    """Copy the elements uW[box.numel] of a box to old uW[count], which are positions start … start+count−1 of a tensor.

    Sets have u8[count] to 1 where it did.
    """
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
        have[places] = 1
