"""The published state at one moment, readable while the snapshot moves on: what moved since is taken back in copies.

Does not copy the model: a tensor is copied when it is read, and the changes since are kept as long as it is open, up to
a limit beyond which it is given up.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_delta_sync.errors import AnchorOutpaced
from vllm_delta_sync.native import Changes
from vllm_delta_sync.trainer import source
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from vllm_delta_sync.trainer.snapshot import Delta


@dataclass(frozen=True, eq=False)
class _Step:
    """What it takes to undo one version, without what else it brought. `bytes` in memory."""

    before: Mapping[TensorSpec, state_hash.Lanes]  # the delta's own, which tells it from others
    by_name: Mapping[str, Sequence[tuple[int, int, Changes]]]  # (start, count, changes) of blocks, by tensor

    @cached_property
    def bytes(self) -> int:
        changes = [changes for blocks in self.by_name.values() for _, _, changes in blocks]
        return sum(part.nbytes for one in changes for part in one)


class FrozenState:
    """The state of a snapshot when this was made. Read it from any thread.

    Args:
        bits: name → the snapshot's own bits uW[numel].
        moving: held by the snapshot while it changes them.
        files: configuration, tokenizer and the like that belong to the model, by file name.
        most_bytes: of changes since, that are kept at most.
    """

    carried: Iterable[TensorSpec] = ()  # a publisher publishes all it has

    def __init__(
        self,
        bits: Mapping[str, source.Bits],
        lanes: Mapping[TensorSpec, state_hash.Lanes],
        moving: threading.Lock,
        files: Mapping[str, bytes],
        most_bytes: int,
    ) -> None:
        self._bits = bits
        self._moving = moving
        self._later: list[_Step] = []  # since, oldest first
        self._most_bytes = most_bytes
        self._outpaced = False
        self.lanes = dict(lanes)
        self.files = files
        self.lost = False  # the version that it is was taken back

    @cached_property
    def state_root(self) -> str:
        """Of the whole model, hex. Hashed when asked for, not while the snapshot is kept from moving."""
        return state_hash.state_root(self.lanes)

    def moved_on(self, delta: Delta) -> None:
        """The snapshot has moved on by a version; it holds `moving`."""
        by_name: dict[str, list[tuple[int, int, Changes]]] = defaultdict(list)
        for block in () if self._outpaced else delta.blocks:
            by_name[block.spec.name].append((block.start, block.count, block.changes))
        self._later.append(_Step(delta.before, by_name))
        if sum(step.bytes for step in self._later) > self._most_bytes:
            self._outpaced = True
            self._later = [_Step(step.before, {}) for step in self._later]

    def moved_back(self, delta: Delta) -> None:
        """The snapshot has taken back a version; it holds `moving`."""
        if not self.stayed(delta):
            self.lost = True

    def stayed(self, delta: Delta) -> bool:
        """The snapshot has not moved on by this version after all; returns whether `moved_on` was told of it."""
        told = bool(self._later) and self._later[-1].before is delta.before
        if told:
            self._later.pop()
        return told

    def read(self, spec: TensorSpec) -> source.Bits:
        """A copy of the bits uW[numel] of a tensor as they were. Raises AnchorOutpaced when too much changed since."""
        with self._moving:
            self._require_kept()
            bits = self._bits[spec.name].copy()
            later = [step.by_name.get(spec.name, ()) for step in self._later]
        for blocks in reversed(later):
            for start, count, changes in blocks:
                changes.undo(bits[start : start + count])
        return bits

    def read_block(self, spec: TensorSpec, start: int, count: int) -> source.Bits:
        """The same of elements start … start+count−1 alone, which are a block of `split_blocks`."""
        with self._moving:
            self._require_kept()
            bits = self._bits[spec.name][start : start + count].copy()
            later = [step.by_name.get(spec.name, ()) for step in self._later]
        for blocks in reversed(later):
            for at, _, changes in blocks:
                if at == start:
                    changes.undo(bits)
        return bits

    def _require_kept(self) -> None:
        if self._outpaced:
            raise AnchorOutpaced(
                f"more than {self._most_bytes} bytes of changes came while it was uploaded; a faster way to the "
                "bucket, or the command `anchor` on another machine, writes one"
            )
