"""The native contract on the C library (csrc/cpu): checks arguments, then hands over addresses. ctypes drops the GIL.

Does not fall back: importing it without the library raises ImportError, and `native` then takes `portable`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.library import CPU_FUNCTIONS, load
from vllm_delta_sync.native.types import (
    I64,
    MAX_COUNT,
    U8,
    U16,
    U32,
    WIDTHS,
    Bits,
    Changes,
    Seed,
    address_of,
    bits_width,
    check_map,
    check_merge,
    check_segments,
    coalesce,
    pair_width,
    row,
)

_loaded = load("vllm_delta_sync_cpu", CPU_FUNCTIONS)
if _loaded.library is None:
    raise ImportError(_loaded.reason)
_lib = _loaded.library
PATH = _loaded.reason
INSTRUCTION_SET: str = _lib.vds_instruction_set().decode()

SCRATCH = 1 << 17  # changes per call of the C diff
_LANES = ctypes.c_uint32 * 4
_REFUSALS = {  # enum Status of csrc/cpu/codec.cpp
    1: "ends early",
    2: "has bytes left over",
    3: "leads outside the block",
    4: "writes a step in the long form that has a one-byte form",
}


class _DiffJob(ctypes.Structure):
    """Job of csrc/cpu/diff.cpp. Addresses as numbers."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "width", "before", "after", "n", "offset", "advance", "capacity", "positions", "old", "new", "found",
            "consumed",
        )
    )  # fmt: skip
    width: int
    before: int
    after: int
    n: int
    offset: int
    advance: int
    found: int
    consumed: int


class _Scratch(threading.local):
    """Where the C diff writes, kept from one call to the next: touching new pages costs more than a small diff."""

    def __init__(self) -> None:
        room = SCRATCH + 128
        self._positions = np.empty(room, np.uint32)
        sides = np.empty((2, room), np.uint64)
        self._sides = {width: tuple(side.view(bits) for side in sides) for width, bits in WIDTHS.items()}
        self.job = _DiffJob(capacity=room, positions=address_of(self._positions), old=address_of(sides[0]),
                            new=address_of(sides[1]))  # fmt: skip
        self.address = ctypes.addressof(self.job)

    def take(self, width: int) -> Changes:
        """A copy of the changes that were found last."""
        found = self.job.found
        old, new = self._sides[width]
        return Changes(self._positions[:found].copy(), old[:found].copy(), new[:found].copy())

    def undo(self, snapshot: Bits) -> None:
        """Take back the changes that were found last, without copying them."""
        found = self.job.found
        old, new = self._sides[snapshot.itemsize]
        Changes(self._positions[:found], old[:found], new[:found]).undo(snapshot)


_scratch = _Scratch()


def _dims(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def _lanes(lanes: Any) -> U32:
    return np.array(lanes, np.uint32)


def diff(snapshot: Bits, current: Bits, *, advance: bool) -> Changes:
    """Elements whose bits differ. snapshot, current uW [N], N < 2**31; `advance` writes `current` into the snapshot.

    After any exception, a MemoryError too, the snapshot is what it was.
    """
    width = pair_width("snapshot", snapshot, "current", current)
    size, scratch = snapshot.size, _scratch
    if size >= MAX_COUNT:
        raise ValueError(f"diff takes fewer than 2**31 elements, got {size}; split the tensor into blocks")
    if advance and not snapshot.flags.writeable:
        raise ValueError("diff cannot advance a read-only snapshot; pass a writable one or advance=False")
    pieces: list[Changes] = []
    done, job = 0, scratch.job
    job.width, job.before, job.after, job.advance = width, address_of(snapshot), address_of(current), advance
    job.found = 0
    try:
        while True:
            job.n, job.offset = size - done, done
            _lib.vds_diff(scratch.address)
            pieces.append(scratch.take(width))
            done += job.consumed
            if done == size:
                break
            job.before += job.consumed * width
            job.after += job.consumed * width
        return pieces[0] if len(pieces) == 1 else Changes(*map(np.concatenate, zip(*pieces, strict=True)))
    except BaseException:
        if advance:
            for piece in pieces:
                piece.undo(snapshot)
            # What was found last may not have got into `pieces`; if it has, undoing it twice does no harm.
            scratch.undo(snapshot)
        raise


def hash_run(bits: Bits, start: int, seed: Seed) -> U32:
    """Hash of elements start … start+n−1 of a tensor. bits uW [n] → lanes u32 [4]."""
    width = bits_width("bits", bits)
    if start < 0:
        raise ValueError(f"start {start} is negative")
    lanes = _LANES()
    _lib.vds_hash_run(width, address_of(bits), bits.size, start, seed.a, seed.b, lanes)
    return _lanes(lanes)


def hash_strided(
    address: int,
    width: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    source_offset: int,
    source_strides: Sequence[int],
    seed: Seed,
) -> U32:
    """Hash of a box of raw memory as elements of the checkpoint tensor. → lanes u32 [4].

    Element x of the box lies at address + width · Σ x·strides and is element source_offset + Σ x·source_strides.
    """
    region = coalesce(sizes, strides, source_strides)
    if source_offset < 0:
        raise ValueError(f"source offset {source_offset} is negative")
    lanes = _LANES()
    if math.prod(region.sizes):
        status = _lib.vds_hash_strided(
            width, address, len(region.sizes), _dims(region.sizes), _dims(region.strides), source_offset,
            _dims(region.source_strides), seed.a, seed.b, lanes,
        )  # fmt: skip
        if status:
            raise ValueError(f"width must be 1, 2, 4 or 8 and the rank at most 16, got {width} and {len(region.sizes)}")
    return _lanes(lanes)


def hash_changes(positions: U32, start: int, old: Bits, new: Bits, seed: Seed) -> U32:
    """What a change from old to new at elements start + positions adds to the hash. → lanes u32 [4]."""
    width = pair_width("old", old, "new", new)
    row("positions", positions, np.uint32, old.size)
    if start < 0:
        raise ValueError(f"start {start} is negative")
    lanes = _LANES()
    _lib.vds_hash_changes(
        width, address_of(positions), start, address_of(old), address_of(new), old.size, seed.a, seed.b, lanes
    )
    return _lanes(lanes)


def encode_gaps(positions: U32) -> U8:
    """The gap stream (docs/protocol.md, *Codecs*) of ascending positions u32 [n]. ValueError if they do not ascend."""
    row("positions", positions, np.uint32)
    size = _lib.vds_gaps_size(address_of(positions), positions.size)
    if size < 0:
        raise ValueError("positions must ascend strictly")
    stream = np.empty(size, np.uint8)
    _lib.vds_encode_gaps(address_of(positions), positions.size, address_of(stream))
    return stream


def decode_gaps(data: U8, changed: int, count: int) -> U32:
    """The positions u32 [changed], all below `count`, of a gap stream. MalformedObject if it is not exactly that."""
    row("data", data, np.uint8)
    if not 0 <= changed <= count < MAX_COUNT:
        raise MalformedObject(f"gap stream: {changed} changed of {count} elements is out of range")
    if data.size < changed or data.size > changed + count // 255:
        raise MalformedObject(f"gap stream: {data.size} bytes cannot hold {changed} gaps below {count}")
    positions = np.empty(changed, np.uint32)
    status = _lib.vds_decode_gaps(address_of(data), data.size, changed, count, address_of(positions))
    if status:
        raise MalformedObject(f"gap stream of {changed} changed in {count} elements {_REFUSALS[status]}")
    return positions


def encode_steps(old: U16, new: U16) -> U8:
    """The step stream of old → new, u16 [n] each. ValueError where they are equal: such an element has no code."""
    row("old", old, np.uint16)
    row("new", new, np.uint16, old.size)
    size = _lib.vds_steps_size(address_of(old), address_of(new), old.size)
    if size < 0:
        raise ValueError(f"element {-1 - size} did not change; only changed elements have a step")
    stream = np.empty(size, np.uint8)
    _lib.vds_encode_steps(address_of(old), address_of(new), old.size, address_of(stream))
    return stream


def decode_steps(data: U8, changed: int) -> U16:
    """The steps, int16 bits as u16 [changed], of a step stream. MalformedObject if it is not exactly that."""
    row("data", data, np.uint8)
    if not 0 <= changed < MAX_COUNT:
        raise MalformedObject(f"step stream: {changed} steps is out of range")
    if not changed <= data.size <= 3 * changed:
        raise MalformedObject(f"step stream: {data.size} bytes cannot hold {changed} steps")
    steps = np.empty(changed, np.uint16)
    status = _lib.vds_decode_steps(address_of(data), data.size, changed, address_of(steps))
    if status:
        raise MalformedObject(f"step stream of {changed} steps {_REFUSALS[status]}")
    return steps


def apply_steps(old: U16, steps: U16) -> U16:
    """new u16 [n] with k(new) = k(old) + step mod 2**16."""
    row("old", old, np.uint16)
    row("steps", steps, np.uint16, old.size)
    new = np.empty(old.size, np.uint16)
    _lib.vds_apply_steps(address_of(old), address_of(steps), old.size, address_of(new))
    return new


def merge(first_positions: U32, first: Bits, second_positions: U32, second: Bits, *, add: bool) -> tuple[U32, Bits]:
    """The union of two changes: positions u32 [n] and [m], ascending, with uW [n] and [m] → positions u32 [k], uW [k].

    Where both have a position, its value is the second's or, with `add`, the sum mod 2**(8 W), and what sums to zero is
    left out.
    """
    width = check_merge(first_positions, first, second_positions, second)
    room = first.size + second.size
    positions, values = np.empty(room, np.uint32), np.empty(room, first.dtype)
    found = _lib.vds_merge(
        width, address_of(first_positions), address_of(first), first.size, address_of(second_positions),
        address_of(second), second.size, add, address_of(positions), address_of(values),
    )  # fmt: skip
    return positions[:found], values[:found]


def map_positions(
    positions: U32,
    start: int,
    sizes: Sequence[int],
    source_offset: int,
    source_strides: Sequence[int],
    target_strides: Sequence[int],
) -> tuple[U32, I64]:
    """Which of the elements start + positions lie in a region, and where it puts them.

    The region's dimensions are sorted by falling source stride; its source strides nest (ValueError otherwise).
    Returns (selected u32 [m]: indices into `positions`, targets i64 [m]: relative to the region's target offset).
    """
    row("positions", positions, np.uint32)
    check_map(start, sizes, source_strides, target_strides)
    selected, targets = np.empty(positions.size, np.uint32), np.empty(positions.size, np.int64)
    found = 0
    if min(sizes, default=1) > 0:
        wide = [d for d, size in enumerate(sizes) if size > 1]
        found = _lib.vds_map_positions(
            address_of(positions), positions.size, start - source_offset, len(wide), _dims([sizes[d] for d in wide]),
            _dims([source_strides[d] for d in wide]), _dims([target_strides[d] for d in wide]), address_of(selected),
            address_of(targets),
        )  # fmt: skip
    if found < 0:
        raise ValueError(f"a region has at most 16 dimensions, got sizes {sizes}")
    return selected[:found].copy(), targets[:found].copy()


def gather(address: int, width: int, offsets: U32) -> Bits:
    """The elements at address + width · offsets of raw memory. offsets u32 [n] → uW [n]. The caller vouches."""
    row("offsets", offsets, np.uint32)
    if width not in WIDTHS:
        raise ValueError(f"width must be 1, 2, 4 or 8 bytes, got {width}")
    bits = np.empty(offsets.size, WIDTHS[width])
    _lib.vds_gather(width, address, address_of(offsets), offsets.size, address_of(bits))
    return bits


def scatter(segments: I64, offsets: U32, expected: Bits, values: Bits, *, threads: int) -> int:
    """Write `values` over raw memory that holds `expected`, or nothing at all.

    A row of segments i64 [S, 4] is (address of its element 0, first, last, 0): element i of first … last−1 goes to
    address + width · offsets[i]. Targets are distinct. Returns −1, or the index of the first element whose live bits
    are not `expected`; then no live bit differs from before the call. The caller vouches for addresses and offsets.
    """
    width = pair_width("expected", expected, "values", values)
    row("offsets", offsets, np.uint32, values.size)
    check_segments(segments, values.size)
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    outcome: int = _lib.vds_scatter(
        width, address_of(segments), len(segments), address_of(offsets), address_of(expected), address_of(values),
        values.size, threads,
    )  # fmt: skip
    return outcome


def read_sum(data: U8) -> int:
    """Sum mod 2**64 of a buffer's 8-byte words (a tail of less than 8 bytes is left out): reads every byte once."""
    row("data", data, np.uint8)
    return int(_lib.vds_read_sum(address_of(data), data.size // 8))
