"""What a checkpoint tensor is on the wire (name, dtype, shape), and how it is cut into blocks.

Does not hold any elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import dtypes

MAX_NAME_BYTES = 1024
MAX_RANK = 16
MAX_BYTES = 1 << 48  # of one tensor; keeps every offset and product well inside 63 bits
BLOCK_ELEMENTS = 1 << 22  # of a block at most
BAND_ELEMENTS = 1 << 20  # of a block at least, when a tensor is cut for ranks that hold a part of its rows each
BANDS = 16  # into which a tensor is cut for them


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Identity of a checkpoint tensor; raises MalformedObject when a field breaks the protocol.

    Args:
        name: 1 to 1024 UTF-8 bytes without line feeds or NULs.
        dtype: a safetensors dtype name of the closed table.
        shape: at most 16 sizes, none negative; `()` is a scalar of one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            size = len(self.name.encode())
        except UnicodeEncodeError:
            raise MalformedObject(f"tensor name {self.name[:80]!r} is not valid UTF-8") from None
        if not 0 < size <= MAX_NAME_BYTES or "\n" in self.name or "\0" in self.name:
            raise MalformedObject(
                f"tensor name {self.name[:80]!r} must be 1 to {MAX_NAME_BYTES} bytes without line feeds or NULs"
            )
        width = dtypes.by_name(self.dtype).width
        if len(self.shape) > MAX_RANK or any(type(n) is not int or n < 0 for n in self.shape):
            raise MalformedObject(f"{self._shown()} must be at most {MAX_RANK} integers >= 0")
        if math.prod(self.shape) * width > MAX_BYTES or any(n > MAX_BYTES for n in self.shape):
            raise MalformedObject(f"{self._shown()} is larger than {MAX_BYTES} bytes")

    def _shown(self) -> str:
        return f"tensor {self.name!r}: shape {str(list(self.shape[:MAX_RANK]))[:200]}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes per element."""
        return dtypes.by_name(self.dtype).width

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.width


def split_blocks(spec: TensorSpec) -> list[tuple[int, int]]:
    """Cut a tensor into blocks (start, count) in flat elements that cover it in order; none for an empty tensor.

    A block holds whole rows of dim 0, at most 2**22 elements. There is a power of two of them: as many as that takes,
    and up to 16 while each still has 2**20 elements. So where 2, 4, 8 or 16 ranks split the rows, blocks end too. A row
    larger than a block is cut by its own rows, so no block ever spans two outer rows (two experts, say) unless both fit
    in it whole.
    """
    return list(_cut(0, spec.shape)) if spec.numel else []


def _cut(start: int, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    total = math.prod(shape)
    if total < 2 * BAND_ELEMENTS:
        yield start, total
        return
    row = math.prod(shape[1:])
    if row > BLOCK_ELEMENTS:
        for index in range(shape[0]):
            yield from _cut(start + index * row, shape[1:])
        return
    pieces = 1
    while -(-shape[0] // pieces) * row > BLOCK_ELEMENTS or (pieces < BANDS and total >= 2 * pieces * BAND_ELEMENTS):
        pieces *= 2
    rows = -(-shape[0] // pieces)
    for first in range(0, shape[0], rows):
        yield start + first * row, min(rows, shape[0] - first) * row
