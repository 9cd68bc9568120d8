"""Decodes ctx blocks on the device that holds the weights, many at a time, against live memory as it lies.

Reads live memory, writes none; only tiles go there and changes come back. Leaves integers, and blocks that several
regions share, to `tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.kernels import CodedBlock, Decoded, DecodeTiles
from vllm_delta_sync.kernels.ctx import decode_on_host
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.tiles import sound, window_of
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.codecs import ctx_header, encoded_of
from vllm_delta_sync.wire.ctx import CtxWindow
from vllm_delta_sync.wire.encoded import DecodedBlock
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block

CHANGES = 1 << 20  # of the blocks of a launch, about: each takes some 30 bytes of the device's memory meanwhile
ELEMENTS = 1 << 27  # of them: enough tiles to keep a device busy


@dataclass(frozen=True, eq=False)
class _Waiting:
    block: Block
    window: CtxWindow
    coded: CodedBlock


@dataclass(eq=False)
class DeviceTiles:
    """Collects ctx blocks, which come tensor by tensor, and decodes them together.

    Args:
        decode: the backend's.
        regions: the rank's layout; the elements of two regions of a tensor are the same, or none are.
        memory: where old values are read.
    """

    decode: DecodeTiles
    regions: Sequence[Region]
    memory: LiveMemory
    _waiting: list[_Waiting] = field(init=False, default_factory=list)
    _changed: int = field(init=False, default=0)  # of the blocks that wait, at most
    _sizes: int = field(init=False, default=0)  # elements of them
    _tensor: str = field(init=False, default="")
    _elements: dict[int, torch.Tensor] = field(init=False, default_factory=dict)  # of regions of that tensor

    def take(self, block: Block, payload: Buffer, held: Sequence[int]) -> bool:
        """Take a block of floats of which the regions `held`, those of its tensor, hold the same columns of each row.

        Returns False, and takes nothing, where they do not, and of integers. Copies what it keeps of the payload.

        Raises:
            DigestMismatch, MalformedObject: the block is not what its table states.
        """
        encoded = encoded_of(block, payload)
        header = ctx_header(block.spec, block.start, block.count, encoded, f"block {block}")
        found = window_of(header, block.start, self.regions, held)
        if found is None or encoded.model is None or header.dtype.integer:  # the host orders integers as floats
            return False
        window, index, rank = found
        grid = window.header.grid
        coded = CodedBlock(
            model=encoded.model,
            old=self._read(block, index)[rank : rank + grid.elements],
            grid=grid,
            stated=window.header.stated,
            data=np.frombuffer(encoded.value, np.uint8)[window.data].copy(),
            changed=encoded.changed,
        )
        self._waiting.append(_Waiting(block, window, coded))
        self._changed += coded.changed
        self._sizes += grid.elements
        return True

    @property
    def full(self) -> bool:
        """Whether enough blocks wait for a launch."""
        return self._changed >= CHANGES or self._sizes >= ELEMENTS

    def flush(self) -> Iterator[tuple[Block, DecodedBlock]]:
        """The changes of the blocks that wait, in the tiles that this rank holds.

        Where the device has no room for what decoding takes, the host does it.

        Raises StateHashMismatch where the live values are not those that a block was made from.
        """
        waiting, self._waiting = self._waiting, []
        self._changed = self._sizes = 0
        if not waiting:
            return
        coded = [one.coded for one in waiting]
        try:
            found = self.decode(coded)
        except torch.OutOfMemoryError:
            found = [decode_on_host(block) for block in coded]
        for one, changes in zip(waiting, found, strict=True):
            yield one.block, sound(partial(_changes, one, changes))

    def _read(self, block: Block, index: int) -> torch.Tensor:
        if block.spec.name != self._tensor:
            self._tensor, self._elements = block.spec.name, {}
        if index not in self._elements:
            self._elements[index] = self.memory.device_elements(self.regions[index], block.spec.dtype)
        return self._elements[index]


def _changes(one: _Waiting, found: Decoded | None) -> DecodedBlock:
    """What was found, as the host's decoder says it. Raises MalformedObject."""
    whole = one.coded.grid.elements == one.block.count
    if found is None or (whole and len(found[0]) != one.coded.changed):
        raise MalformedObject(
            f"block {one.block}: a ctx tile of {one.coded.grid.tiles} is malformed, or they do not hold the "
            f"{one.coded.changed} changes stated"
        )
    return DecodedBlock(CTX, one.window.in_block(found[0]), None, found[1])
