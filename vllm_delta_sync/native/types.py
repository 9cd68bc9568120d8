"""The types of the native contract, and the argument checks that both of its implementations share.

Does no work on data but undoing it: the loops are in the C library (`cpu.py`) and in numpy (`portable.py`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]
Bits = NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes: an element's bits

WIDTHS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
MAX_COUNT = 2**31  # elements of one block or one diff; positions are u32
_UNDO = 1 << 12  # elements written back at a time: numpy makes 8 bytes of each position, and memory may have run out


class Changes(NamedTuple):
    """Elements that differ between two states of one tensor."""

    positions: U32  # [n], ascending
    old: Bits  # [n]
    new: Bits  # [n]

    def undo(self, bits: Bits) -> None:
        """Write the old bits over the new ones in the row uW [N] where they were found."""
        for at in range(0, self.positions.size, _UNDO):
            part = slice(at, at + _UNDO)
            bits[self.positions[part]] = self.old[part]


class Seed(NamedTuple):
    """The two unsigned 64-bit seeds of a tensor's state hash (docs/protocol.md, *State hash*)."""

    a: int
    b: int


class Region(NamedTuple):
    """A box of elements: where they lie in memory and which elements of the checkpoint tensor they are."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    source_strides: tuple[int, ...]


def address_of(values: NDArray[Any]) -> int:
    """Where a contiguous array lies: `values.ctypes.data`, but that takes longer than many a loop that wants it."""
    if values.size and values.flags.writeable:
        return ctypes.addressof(ctypes.c_byte.from_buffer(values))  # type: ignore[arg-type]
    return int(values.ctypes.data)


def bits_width(what: str, bits: Bits) -> int:
    """Width in bytes of a contiguous 1-D array of unsigned integers; TypeError or ValueError if it is not one."""
    dtype, flags = bits.dtype, bits.flags
    if dtype.kind != "u" or not dtype.isnative:
        raise TypeError(f"{what} must be unsigned integers of 1 to 8 bytes, got {dtype}; view the bits first")
    if bits.ndim != 1 or not flags.c_contiguous:
        raise ValueError(f"{what} must be one contiguous row, got shape {bits.shape}; flatten it first")
    if not flags.aligned:
        raise ValueError(f"{what} must be aligned, but begin at address {bits.ctypes.data}; copy them first")
    return int(dtype.itemsize)


def row(what: str, values: NDArray[Any], dtype: type[np.generic], length: int | None = None) -> None:
    """Refuse anything but a contiguous 1-D array of this dtype (and length)."""
    flags = values.flags
    if values.dtype != dtype:
        raise TypeError(f"{what} must be {np.dtype(dtype).name}, got {values.dtype}")
    if values.ndim != 1 or not flags.c_contiguous:
        raise ValueError(f"{what} must be one contiguous row, got shape {values.shape}")
    if not flags.aligned:
        raise ValueError(f"{what} must be aligned, but begin at address {values.ctypes.data}; copy them first")
    if length is not None and values.shape[0] != length:
        raise ValueError(f"{what} must have {length} elements, got {values.shape[0]}")


def pair_width(first: str, a: Bits, second: str, b: Bits) -> int:
    """Common width in bytes of two rows of equal dtype and length."""
    width = bits_width(first, a)
    if bits_width(second, b) != width or a.shape != b.shape:
        raise ValueError(
            f"{first} and {second} must have one dtype and length, got {a.dtype}[{a.size}] and {b.dtype}[{b.size}]"
        )
    return width


def check_merge(first_positions: U32, first: Bits, second_positions: U32, second: Bits) -> int:
    """Common width in bytes of two lists of changes; refuse what is not contiguous rows of matching dtypes, lengths."""
    row("first_positions", first_positions, np.uint32)
    row("second_positions", second_positions, np.uint32)
    width = bits_width("first", first)
    if bits_width("second", second) != width or (first.size, second.size) != (
        first_positions.size,
        second_positions.size,
    ):
        raise ValueError(
            f"first and second must have one dtype and a value per position, got {first.dtype}[{first.size}] at "
            f"{first_positions.size} and {second.dtype}[{second.size}] at {second_positions.size}"
        )
    return width


def check_segments(segments: I64, elements: int) -> None:
    """Refuse segments that are not i64[S, 4], ascending, disjoint and inside `elements`, with reserved zeros."""
    if segments.dtype != np.int64 or segments.ndim != 2 or segments.shape[1] != 4 or not segments.flags.c_contiguous:
        raise TypeError(f"segments must be contiguous int64 [S, 4], got {segments.dtype} {segments.shape}")
    if not len(segments):
        return
    first, last = segments[:, 1], segments[:, 2]
    inside = first[0] >= 0 and last[-1] <= elements and bool((first <= last).all())
    if not inside or not bool((first[1:] >= last[:-1]).all()):
        raise ValueError(f"segments must be ascending, disjoint ranges [first, last) within {elements} elements")
    if segments[:, 3].any():
        raise ValueError("the fourth column of segments is reserved and must be 0")


def coalesce(sizes: Sequence[int], strides: Sequence[int], source_strides: Sequence[int]) -> Region:
    """The same elements with falling source strides, dimensions of one element dropped and mergeable ones merged.

    The order in which elements are visited may change, which no caller depends on (the state hash is a sum).
    """
    if not len(sizes) == len(strides) == len(source_strides):
        raise ValueError(f"sizes, strides and source strides differ in rank: {sizes}, {strides}, {source_strides}")
    if min(sizes, default=0) < 0 or min(strides, default=0) < 0 or min(source_strides, default=0) < 0:
        raise ValueError(f"negative size or stride: {sizes}, {strides}, {source_strides}")
    if math.prod(sizes) == 0:
        return Region((0,), (1,), (1,))
    dims = sorted(
        ((n, s, q) for n, s, q in zip(sizes, strides, source_strides, strict=True) if n != 1),
        key=lambda dim: -dim[2],
    )
    merged: list[tuple[int, int, int]] = []
    for size, stride, source in dims:
        if merged:
            outer_size, outer_stride, outer_source = merged[-1]
            if outer_stride == size * stride and outer_source == size * source:
                merged[-1] = (outer_size * size, stride, source)
                continue
        merged.append((size, stride, source))
    if not merged:
        merged = [(1, 1, 1)]
    columns = list(zip(*merged, strict=True))
    return Region(columns[0], columns[1], columns[2])


def check_map(start: int, sizes: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int]) -> None:
    """Refuse a region that `map_positions` cannot invert: its source strides must fall, each spanning those below."""
    if not len(sizes) == len(source_strides) == len(target_strides):
        raise ValueError(f"sizes and strides of a region differ in rank: {sizes}, {source_strides}, {target_strides}")
    if start < 0 or min(sizes, default=0) < 0:
        raise ValueError(f"negative start or size: {start}, {sizes}")
    span = 1  # one past the largest offset that the dimensions below reach
    for size, stride in zip(reversed(sizes), reversed(source_strides), strict=True):
        if size <= 1:
            continue
        if stride < span:
            raise ValueError(
                f"source strides {source_strides} of sizes {sizes} do not nest; sort the dimensions by falling stride"
            )
        span += (size - 1) * stride
