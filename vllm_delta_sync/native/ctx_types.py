"""What both implementations of the `ctx` codec's loops take and give, and the checks they share.

Does not code: the loops are in the C library (`ctx_cpu.py`) and, slowly, in numpy (`portable_ctx.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.types import I64, MAX_COUNT, U8, U16, Bits, Changes, address_of, bits_width, row

TILE_ELEMENTS = 1 << 18  # of a tile at most
MAX_TILES = 1 << 12  # of a block
CONTEXTS = 256
MAX_CLASSES = 16
SCALE = 12  # bits of a frequency
TOTAL = 1 << SCALE  # what the frequencies of a class add up to
EXACT = 16  # magnitudes below have a symbol each
GAP_END, GAP_ESCAPE, GAP_SYMBOLS = 72, 73, 74
STEP_ESCAPE, STEP_SYMBOLS = 248, 249
MANY_LANES = 4  # states of a tile of LANE_CHANGES changes or more; one of any other
LANE_CHANGES = 2048
CTX_WIDTHS = (1, 2, 4)


class CtxModel(NamedTuple):
    """Classes of contexts, and the frequencies of gap and step symbols in each. `ctx_model` makes one, checked."""

    last: U8  # [C], the last context of each class, ascending to 255
    gaps: U16  # [C, 74]
    steps: U16  # [C, 249]
    prepared: U8  # the same as the C library wants it, and its address; empty where there is none
    address: int = 0


class Tally(NamedTuple):
    """How often each symbol occurs in each class, or elements and step symbols in each context."""

    gaps: I64  # [C, 74]; of contexts: elements in each, [256]
    steps: I64  # [C, 249]

    @classmethod
    def of_classes(cls, classes: int) -> Tally:
        """Nothing counted yet, for `ctx_tally`."""
        return cls(np.zeros((classes, GAP_SYMBOLS), np.int64), np.zeros((classes, STEP_SYMBOLS), np.int64))

    @classmethod
    def of_contexts(cls) -> Tally:
        """Nothing counted yet, for `ctx_survey`."""
        return cls(np.zeros(CONTEXTS, np.int64), np.zeros((CONTEXTS, STEP_SYMBOLS), np.int64))


@dataclass(frozen=True, eq=False)
class CtxGrid:
    """A block as rows of elements, cut into strips of columns; each strip is cut into tiles of whole rows.

    Tiles are counted strip by strip, and down each strip. All but `ctx_tally` want strips that cover a row in order.
    """

    rows: int
    row_length: int  # elements
    strips: I64  # [S, 2]: first column, columns, at most 2**18

    @property
    def elements(self) -> int:
        """Of the block."""
        return self.rows * self.row_length

    @cached_property
    def sound(self) -> bool:
        """Whether strips are of 1 to 2**18 columns and follow each other in a row, and tiles are at most 2**12."""
        if self.strips.ndim != 2 or not len(self.strips) or not self.strips.flags.c_contiguous:
            return False
        begins, columns = self.strips.T
        ends = begins + columns
        narrow = ((columns >= 1) & (columns <= TILE_ELEMENTS)).all()
        if not narrow or self.tiles > MAX_TILES:
            return False
        return bool(begins[0] >= 0 and ends[-1] <= self.row_length and (begins[1:] >= ends[:-1]).all())

    def _described(self) -> I64:
        """As the C library wants it: Grid of csrc/cpu/ctx_grid.h."""
        return np.array((self.rows, self.row_length, address_of(self.strips), len(self.strips)), np.int64)

    @property
    def address(self) -> int:
        """Of what the C library reads of the grid, which lives as long as this."""
        kept = vars(self).get("described")
        if kept is None:
            # Threads share grids, and what one of them has the address of must not be let go of for another one's.
            kept = vars(self).setdefault("described", self._described())
        return address_of(kept)

    @cached_property
    def covered(self) -> int:
        """Columns in strips."""
        return int(self.strips[:, 1].sum())

    @cached_property
    def tile_rows(self) -> I64:
        """Rows of each strip's tiles but the last, [S]."""
        return np.asarray(TILE_ELEMENTS // self.strips[:, 1])

    @cached_property
    def tiles(self) -> int:
        """How many there are."""
        return int((-(-self.rows // self.tile_rows)).sum())

    @cached_property
    def boxes(self) -> I64:
        """Each tile's first row, rows, first column and columns, [T, 4]."""
        found = [
            (first, min(height, self.rows - first), column, columns)
            for (column, columns), height in zip(self.strips.tolist(), self.tile_rows.tolist(), strict=True)
            for first in range(0, self.rows, height)
        ]
        return np.array(found, np.int64).reshape(-1, 4)


def check_model(last: U8, gaps: U16, steps: U16) -> None:
    """Raise MalformedObject unless these are the classes and frequencies of a model."""
    row("last", last, np.uint8)
    count = last.size
    if gaps.shape != (count, GAP_SYMBOLS) or steps.shape != (count, STEP_SYMBOLS):
        raise ValueError(
            f"{count} classes want frequencies [{count}, 74] and [{count}, 249], not {gaps.shape}, {steps.shape}"
        )
    if not 1 <= count <= MAX_CLASSES or last[-1] != CONTEXTS - 1 or (last[1:] <= last[:-1]).any():
        raise MalformedObject(
            f"a model of {count} classes that end at {last.tolist()[:17]}: want 1 to 16, ascending to 255"
        )
    for what, table in (("gap", gaps), ("step", steps)):
        if (table > TOTAL).any() or (table.sum(axis=1, dtype=np.int64) != TOTAL).any():
            raise MalformedObject(f"a model whose {what} frequencies do not add up to {TOTAL} in each class")


def check_block(grid: CtxGrid, old: Bits) -> int:
    """The width of a block's old values; ValueError unless they are those of the grid, and the grid can be coded."""
    width = bits_width("old", old)
    if width not in CTX_WIDTHS:
        raise ValueError(f"ctx codes elements of 1, 2 or 4 bytes, got {width}")
    if old.size != grid.elements or not 0 < old.size < MAX_COUNT:
        raise ValueError(f"{old.size} old values for {grid.rows} rows of {grid.row_length}")
    if not grid.sound:
        raise ValueError(f"strips {grid.strips.tolist()[:4]} … do not follow each other in a row of {grid.row_length}")
    return width


def check_cover(grid: CtxGrid) -> None:
    """ValueError unless the strips, which follow each other, cover a row."""
    if grid.covered != grid.row_length:
        raise ValueError(f"{len(grid.strips)} strips do not cover a row of {grid.row_length} elements")


def check_changes(old: Bits, changes: Changes) -> None:
    """ValueError unless the changes have positions, and values of the block's width. Their order the loops check."""
    row("positions", changes.positions, np.uint32)
    row("old values of changes", changes.old, old.dtype.type, changes.positions.size)
    row("new values of changes", changes.new, old.dtype.type, changes.positions.size)


def unsorted(grid: CtxGrid) -> ValueError:
    """What to raise for positions that do not ascend."""
    return ValueError(f"positions must ascend strictly, below {grid.elements}")


def check_stated(grid: CtxGrid, stated: I64, data: U8, wanted: U8 | None) -> None:
    """ValueError unless something is stated of each tile, and each is wanted or not."""
    row("stated", stated, np.int64, grid.tiles)
    row("data", data, np.uint8)
    if wanted is not None:
        row("wanted", wanted, np.uint8, grid.tiles)


def check_sizes(stated: I64, data: U8) -> I64:
    """The bytes of each tile, i64 [T]; MalformedObject unless together they are the data."""
    sizes = stated >> 1
    # Read as unsigned, a negative size is too large.
    if sizes.view(np.uint64).max() > data.size or int(sizes.sum()) != data.size:
        raise MalformedObject(f"tiles of {int(sizes.sum())} bytes in a stream of {data.size}")
    return sizes


def malformed(grid: CtxGrid, changed: int) -> MalformedObject:
    """What to raise where tiles cannot be decoded."""
    return MalformedObject(
        f"a ctx tile of {grid.tiles} is malformed, they are not all of the stream, or hold more than {changed} changes"
    )
