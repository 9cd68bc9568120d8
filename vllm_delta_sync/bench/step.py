"""One update as two states of a model: read from two checkpoints, and cut into the blocks that a publisher makes of it.

Does not encode anything and does not measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseMismatch
from vllm_delta_sync.native import Changes
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks

_PIECE = 1 << 16  # elements

Model: TypeAlias = Mapping[str, tuple[TensorSpec, Bits]]  # name → (spec, bits uW[numel])


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One block of one tensor before and after the update."""

    spec: TensorSpec
    start: int  # the block's first element in the flat tensor
    old: Bits  # uW[count]
    new: Bits  # uW[count]

    @property
    def count(self) -> int:
        """Elements."""
        return int(self.new.size)

    def diff(self) -> Changes:
        """What changes; positions are within the block, and there may be none."""
        return native.diff(self.old, self.new, advance=False)


def read(old: Path, new: Path) -> tuple[Model, Model]:
    """Both checkpoints in plain memory, as live weights are, in the order of the tensors' names.

    Raises:
        BaseMismatch: they do not hold the same tensors, or nothing changed.
        NotFound, MalformedObject: one of them cannot be read.
    """
    before, after = open_checkpoint(old), open_checkpoint(new)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after or before.spec(name) != after.spec(name):
            found = [str(side.spec(name)) if name in side else "nothing" for side in (before, after)]
            raise BaseMismatch(
                f"{name!r} is {found[0]} in {old} and {found[1]} in {new}; give two checkpoints of one model"
            )
    models = in_memory(before), in_memory(after)
    if all(_equal(bits, models[1][name][1]) for name, (_, bits) in models[0].items()):
        raise BaseMismatch(f"{old} and {new} are equal, there is no update to measure")
    return models


def _equal(one: Bits, other: Bits) -> bool:
    # In pieces: to free a temporary of a tensor's size makes the allocator keep as much from then on, which a server's
    # does not, and peers that allocate whole tensors would be measured with it.
    return all(np.array_equal(one[at : at + _PIECE], other[at : at + _PIECE]) for at in range(0, one.size, _PIECE))


def parts(before: Model, after: Model) -> Iterator[Part]:
    """Every block of two states of one model, changed or not, in the order of `after`."""
    for name, (spec, bits) in after.items():
        for start, count in split_blocks(spec):
            yield Part(spec, start, before[name][1][start : start + count], bits[start : start + count])


def in_memory(checkpoint: Model) -> Model:
    """A copy in plain memory, in the order of the names: what is mapped comes from the disk when it is read."""
    ordered = sorted(checkpoint, key=str.encode)
    return {name: (spec, np.array(bits)) for name in ordered for spec, bits in [checkpoint[name]]}
