"""The native contract in numpy: correct everywhere, and the reference that the C library is compared with bit for bit.

Does not try to be as fast as the C library; it works in chunks, so that temporaries stay small next to the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.portable_hash import hash_changes, hash_run, hash_strided, memory
from vllm_delta_sync.native.types import (
    I64,
    MAX_COUNT,
    U8,
    U16,
    U32,
    Bits,
    Changes,
    check_map,
    check_merge,
    check_segments,
    pair_width,
    row,
)

__all__ = [
    "apply_steps",
    "decode_gaps",
    "decode_steps",
    "diff",
    "encode_gaps",
    "encode_steps",
    "gather",
    "hash_changes",
    "hash_run",
    "hash_strided",
    "map_positions",
    "merge",
    "read_sum",
    "scatter",
]

CHUNK = 1 << 20  # elements (or bytes of a stream) per step
ESCAPE = 255


def diff(snapshot: Bits, current: Bits, *, advance: bool) -> Changes:
    """Elements whose bits differ. snapshot, current uW [N], N < 2**31; `advance` writes `current` into the snapshot."""
    pair_width("snapshot", snapshot, "current", current)
    if snapshot.size >= MAX_COUNT:
        raise ValueError(f"diff takes fewer than 2**31 elements, got {snapshot.size}; split the tensor into blocks")
    positions = [np.empty(0, np.uint32)]
    for at in range(0, snapshot.size, CHUNK):
        found = np.flatnonzero(snapshot[at : at + CHUNK] != current[at : at + CHUNK])
        positions.append((found + at).astype(np.uint32))
    where = np.concatenate(positions)
    changes = Changes(where, snapshot[where], current[where])
    if advance:
        snapshot[where] = changes.new
    return changes


def encode_gaps(positions: U32) -> U8:
    """The gap stream (docs/protocol.md, *Codecs*) of ascending positions u32 [n]. ValueError if they do not ascend."""
    row("positions", positions, np.uint32)
    pieces = [np.empty(0, np.uint8)]
    previous = -1
    for at in range(0, positions.size, CHUNK):
        part = positions[at : at + CHUNK].astype(np.int64)
        gaps = np.diff(part, prepend=previous) - 1
        previous = int(part[-1])
        if int(gaps.min()) < 0:
            raise ValueError("positions must ascend strictly")
        ends = np.cumsum(gaps // ESCAPE + 1)
        stream = np.full(int(ends[-1]), ESCAPE, np.uint8)
        stream[ends - 1] = gaps % ESCAPE
        pieces.append(stream)
    return np.concatenate(pieces)


def decode_gaps(data: U8, changed: int, count: int) -> U32:
    """The positions u32 [changed], all below `count`, of a gap stream. MalformedObject if it is not exactly that."""
    row("data", data, np.uint8)
    if not 0 <= changed <= count < MAX_COUNT:
        raise MalformedObject(f"gap stream: {changed} changed of {count} elements is out of range")
    if data.size < changed or data.size > changed + count // ESCAPE:
        raise MalformedObject(f"gap stream: {data.size} bytes cannot hold {changed} gaps below {count}")
    positions = np.empty(changed, np.uint32)
    done, total = 0, 0
    for at in range(0, data.size, CHUNK):
        part = data[at : at + CHUNK]
        # A gap is the sum of its bytes, so the running sum of bytes at a gap's end is the sum of all gaps so far.
        sums = np.cumsum(part, dtype=np.int64) + total
        ends = np.flatnonzero(part != ESCAPE)
        if done + ends.size > changed:
            raise MalformedObject(f"gap stream: more than the {changed} gaps stated")
        found = sums[ends] + np.arange(done, done + ends.size)
        if ends.size and int(found[-1]) >= count:
            raise MalformedObject(f"gap stream: position {int(found[-1])} is outside the block of {count} elements")
        positions[done : done + ends.size] = found
        done, total = done + ends.size, int(sums[-1])
    if done != changed or (data.size and data[-1] == ESCAPE):
        raise MalformedObject(f"gap stream: ends after {done} of {changed} gaps")
    return positions


def _ordered(u: U16) -> U16:
    """k(u) of docs/protocol.md mod 2**16: the float's rank. Its own inverse."""
    return np.where(u < 0x8000, u, np.uint16(0x7FFF) - u)


def encode_steps(old: U16, new: U16) -> U8:
    """The step stream of old → new, u16 [n] each. ValueError where they are equal: such an element has no code."""
    row("old", old, np.uint16)
    row("new", new, np.uint16, old.size)
    pieces = [np.empty(0, np.uint8)]
    for at in range(0, old.size, CHUNK):
        step = (_ordered(new[at : at + CHUNK]) - _ordered(old[at : at + CHUNK])).view(np.int16)
        z = ((step << 1) ^ (step >> 15)).view(np.uint16)
        if not z.all():
            raise ValueError(f"element {at + int(np.argmin(z))} did not change; only changed elements have a step")
        long = z > ESCAPE
        ends = np.cumsum(np.where(long, 3, 1))
        stream = np.empty(int(ends[-1]), np.uint8)
        stream[ends[~long] - 1] = z[~long] - 1
        stream[ends[long] - 3] = ESCAPE
        stream[ends[long] - 2] = z[long] & 0xFF
        stream[ends[long] - 1] = z[long] >> 8
        pieces.append(stream)
    return np.concatenate(pieces)


def decode_steps(data: U8, changed: int) -> U16:
    """The steps, int16 bits as u16 [changed], of a step stream. MalformedObject if it is not exactly that."""
    row("data", data, np.uint8)
    if not 0 <= changed < MAX_COUNT:
        raise MalformedObject(f"step stream: {changed} steps is out of range")
    if not changed <= data.size <= 3 * changed:
        raise MalformedObject(f"step stream: {data.size} bytes cannot hold {changed} steps")
    # An escape's two bytes may be 255 themselves, so which 255 is an escape is decided from left to right.
    found: list[int] = []
    free = 0
    for at in np.flatnonzero(data == ESCAPE).tolist():
        if at >= free:
            found.append(at)
            free = at + 3
    if free > data.size:
        raise MalformedObject("step stream: ends inside an escaped step")
    escapes = np.array(found, np.int64)
    if data.size - 2 * escapes.size != changed:
        raise MalformedObject(f"step stream: {data.size - 2 * escapes.size} steps, {changed} stated")
    starts = np.ones(data.size, np.bool_)
    starts[escapes + 1] = False
    starts[escapes + 2] = False
    z = data[starts].astype(np.uint16) + np.uint16(1)
    wide = data[escapes + 1].astype(np.uint16) | (data[escapes + 2].astype(np.uint16) << np.uint16(8))
    if escapes.size and int(wide.min()) <= ESCAPE:
        raise MalformedObject(f"step stream: escaped step code {int(wide.min())} has a one-byte form")
    z[escapes - 2 * np.arange(escapes.size)] = wide
    return (z >> np.uint16(1)) ^ (np.uint16(0) - (z & np.uint16(1)))


def apply_steps(old: U16, steps: U16) -> U16:
    """new u16 [n] with k(new) = k(old) + step mod 2**16."""
    row("old", old, np.uint16)
    row("steps", steps, np.uint16, old.size)
    return _ordered(_ordered(old) + steps)


def merge(first_positions: U32, first: Bits, second_positions: U32, second: Bits, *, add: bool) -> tuple[U32, Bits]:
    """The union of two changes: positions u32 [n] and [m], ascending, with uW [n] and [m] → positions u32 [k], uW [k].

    Where both have a position, its value is the second's or, with `add`, the sum mod 2**(8 W), and what sums to zero is
    left out.
    """
    check_merge(first_positions, first, second_positions, second)
    positions, values = np.concatenate((first_positions, second_positions)), np.concatenate((first, second))
    order = np.argsort(positions, kind="stable")  # of two equal ones, the second's comes after
    positions, values = positions[order], values[order]
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    keep = np.ones(positions.size, np.bool_)
    keep[twice] = False
    if add:
        values[twice + 1] += values[twice]
        keep[twice + 1] = values[twice + 1] != 0
    return positions[keep], values[keep]


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
    selected, targets = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
    for at in range(0, positions.size, CHUNK):
        rest = positions[at : at + CHUNK].astype(np.int64) + (start - source_offset)
        inside = (rest >= 0) & (min(sizes, default=1) > 0)
        target = np.zeros(rest.size, np.int64)
        for size, source_stride, target_stride in zip(sizes, source_strides, target_strides, strict=True):
            if size <= 1:
                continue
            index, rest = np.divmod(rest, source_stride)
            inside &= index < size
            target += index * target_stride
        inside &= rest == 0
        where = np.flatnonzero(inside)
        selected.append((where + at).astype(np.uint32))
        targets.append(target[where])
    return np.concatenate(selected), np.concatenate(targets)


def gather(address: int, width: int, offsets: U32) -> Bits:
    """The elements at address + width · offsets of raw memory. offsets u32 [n] → uW [n]. The caller vouches."""
    row("offsets", offsets, np.uint32)
    return memory(address, width, int(offsets.max(initial=0)) + 1 if offsets.size else 0)[offsets]


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
    places = []
    for address, first, last, _ in segments.tolist():
        where = offsets[first:last]
        live = memory(address, width, int(where.max(initial=0)) + 1 if where.size else 0)
        wrong = np.flatnonzero(live[where] != expected[first:last])
        if wrong.size:
            return int(first + wrong[0])
        places.append((live, where, values[first:last]))
    for live, where, new in places:
        live[where] = new
    return -1


def read_sum(data: U8) -> int:
    """Sum mod 2**64 of a buffer's 8-byte words (a tail of less than 8 bytes is left out): reads every byte once."""
    row("data", data, np.uint8)
    words = data[: data.size // 8 * 8].view(np.uint64)
    return int(words.sum(dtype=np.uint64))
