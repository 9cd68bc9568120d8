"""The published state at one moment, readable while the snapshot moves on: what moved since is taken back in copies.

Does not copy the model: a tensor is copied when it is read, and the changes since are kept as long as it is open.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_delta_sync.trainer import source
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from vllm_delta_sync.trainer.snapshot import BlockDelta, Delta


class FrozenState:
    """The state of a snapshot when this was made. Read it from any thread.

    Args:
        bits: name → the snapshot's own bits uW[numel].
        moving: held by the snapshot while it changes them.
        files: configuration, tokenizer and the like that belong to the model, by file name.
    """

    carried: Iterable[TensorSpec] = ()  # a publisher publishes all it has

    def __init__(
        self,
        bits: Mapping[str, source.Bits],
        lanes: Mapping[TensorSpec, state_hash.Lanes],
        moving: threading.Lock,
        files: Mapping[str, bytes],
    ) -> None:
        self._bits = bits
        self._moving = moving
        self._later: list[tuple[Delta, Mapping[str, list[BlockDelta]]]] = []  # since, oldest first
        self.lanes = dict(lanes)
        self.files = files
        self.lost = False  # the version that it is was taken back

    @cached_property
    def state_root(self) -> str:
        """Of the whole model, hex. Hashed when asked for, not while the snapshot is kept from moving."""
        return state_hash.state_root(self.lanes)

    def moved_on(self, delta: Delta) -> None:
        """The snapshot has moved on by a version; it holds `moving`."""
        by_name: dict[str, list[BlockDelta]] = defaultdict(list)
        for block in delta.blocks:
            by_name[block.spec.name].append(block)
        self._later.append((delta, by_name))

    def moved_back(self, delta: Delta) -> None:
        """The snapshot has taken back a version; it holds `moving`."""
        if self._later and self._later[-1][0] is delta:
            self._later.pop()
        else:
            self.lost = True

    def read_block(self, spec: TensorSpec, start: int, count: int) -> source.Bits:
        """The same of elements start … start+count−1, a block of `split_blocks`."""
        with self._moving:
            bits = self._bits[spec.name][start : start + count].copy()
            later = [by_name.get(spec.name, []) for _, by_name in self._later]
        for blocks in reversed(later):
            for block in blocks:
                if block.start == start:
                    block.changes.undo(bits)
        return bits

    def read(self, spec: TensorSpec) -> source.Bits:
        """A copy of the bits uW[numel] of a tensor as they were."""
        with self._moving:
            bits = self._bits[spec.name].copy()
            later = [by_name.get(spec.name, []) for _, by_name in self._later]
        for blocks in reversed(later):
            for block in blocks:
                block.changes.undo(bits[block.start : block.start + block.count])
        return bits
