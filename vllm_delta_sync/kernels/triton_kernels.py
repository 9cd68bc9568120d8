"""The Triton programs themselves; imported only where Triton is, since it has to see their source when it is loaded.

Does not check arguments: `kernels.triton` prepares them. docs/protocol.md, *State hash*, is normative for the hash.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(2**64 - 1)  # of an outcome: all is as expected; −1 for the host


@triton.jit
def _places(runs, offsets, like, TILE: tl.constexpr):
    """Indices of one run's elements, which of them exist, and where each lives."""
    row = runs + 3 * tl.program_id(0)
    address, first, last = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    index = first + tl.arange(0, TILE)
    exists = index < last
    offset = tl.load(offsets + index, exists, 0).to(tl.int64) & 0xFFFFFFFF
    return index, exists, address.to(like.dtype) + offset


@triton.jit
def compare(runs, offsets, expected, outcome, TILE: tl.constexpr):
    """The lowest index whose live bits are not as expected goes to `outcome` uint64, which holds NONE before."""
    index, exists, live = _places(runs, offsets, expected, TILE)
    wrong = exists & (tl.load(live, exists, 0) != tl.load(expected + index, exists, 0))
    lowest = tl.min(tl.where(wrong, index.to(tl.uint64), NONE))
    if lowest != NONE:
        tl.atomic_min(outcome, lowest)


@triton.jit
def write(runs, offsets, values, outcome, TILE: tl.constexpr):
    """Write every element, or none where `outcome` is not NONE."""
    if tl.load(outcome) == NONE:
        index, exists, live = _places(runs, offsets, values, TILE)
        tl.store(live, tl.load(values + index, exists, 0), exists)


@triton.jit
def _mix64(v):
    z = v * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _quadratic(u):
    return (u * (2 * u + 1)) & 0xFFFF


@triton.jit
def _signed(u):
    return ((u ^ 0x8000) - 0x8000).to(tl.int32)


@triton.jit
def _lane(reading, keys, at, block_key):
    products = (reading * tl.load(keys + at).to(tl.int32)).to(tl.uint32)
    return tl.sum(products) * (block_key | 1).to(tl.uint32)


@triton.jit(do_not_specialize=["blocks", "programs"])  # one program for runs of any length: it is compiled once
def state_hash(units, numbers, keys, lanes, blocks, programs, BLOCK: tl.constexpr):
    """Adds the hash of units first … first+n−1 of a tensor to `lanes` int32 [4]; numbers: int64 (n, first, a, b)."""
    n, first = tl.load(numbers), tl.load(numbers + 1)
    a, b = tl.load(numbers + 2).to(tl.uint64), tl.load(numbers + 3).to(tl.uint64)
    place = tl.arange(0, BLOCK)
    zero = tl.program_id(0).to(tl.uint32) * 0
    h0, h1, h2, h3 = zero, zero, zero, zero
    for round in range(tl.program_id(0), blocks, programs):
        block = first // BLOCK + round
        at = block * BLOCK + place - first
        unit = tl.load(units + at, (at >= 0) & (at < n), 0).to(tl.int32) & 0xFFFF
        once = _quadratic(unit)
        twice = _quadratic(((once << 8) | (once >> 8)) & 0xFFFF)
        y, z = _mix64(a + block.to(tl.uint64)), _mix64(b + block.to(tl.uint64))
        h0 += _lane(_signed(once), keys, place, y & 0xFFFFFFFF)
        h1 += _lane(_signed(once), keys, BLOCK + place, y >> 32)
        h2 += _lane(_signed(twice), keys, 2 * BLOCK + place, z & 0xFFFFFFFF)
        h3 += _lane(_signed(twice), keys, 3 * BLOCK + place, z >> 32)
    tl.atomic_add(lanes, h0.to(tl.int32))
    tl.atomic_add(lanes + 1, h1.to(tl.int32))
    tl.atomic_add(lanes + 2, h2.to(tl.int32))
    tl.atomic_add(lanes + 3, h3.to(tl.int32))
