"""A patch of live weights, as it is staged on the host and as the kernels read it.

Holds tensors; does not move or write anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from vllm_delta_sync.native.types import I64, U32, Bits


class Patch(Protocol):
    """An update in host memory; the columns are those of the `scatter_` op."""

    @property
    def segments(self) -> I64: ...
    @property
    def offsets(self) -> U32: ...
    @property
    def expected(self) -> Bits: ...
    @property
    def values(self) -> Bits: ...


@dataclass(frozen=True, eq=False)
class Prepared:
    """A patch where the kernels read it. Of a GPU the columns are on the device or in pinned memory of the host."""

    targets: tuple[Tensor, ...]  # flat integers of one width: views of live storages, kept alive by this
    places: Tensor  # i64 [·, ·]: where elements go, as the backend that placed them wants it told
    offsets: Tensor  # i32 [n]
    expected: Tensor  # [n]; together with the others it is what undoes the patch
    values: Tensor  # [n]
    turn: int = 0  # of the arena that holds them; when it has another one, they are gone

    @property
    def elements(self) -> int:
        """Live elements that it writes."""
        return self.values.numel()

    @property
    def width(self) -> int:
        """Bytes of each."""
        return self.values.element_size()

    def reversed(self) -> Prepared:
        """What takes it back."""
        return replace(self, expected=self.values, values=self.expected)
