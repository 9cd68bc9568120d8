"""The state hash of docs/protocol.md in numpy.

Does not know names, dtypes or shapes: seeds come from `wire.state_hash`. Exact: every partial sum fits its type.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_delta_sync.native.types import U32, WIDTHS, Bits, Seed, bits_width, coalesce, pair_width, row

LANES = 4
BLOCK = 1024  # units that share one R
CHUNK = 1 << 18  # elements per step: bounds the temporaries to a few MB
U64 = NDArray[np.uint64]


def mix64(v: U64) -> U64:
    """The finaliser of docs/protocol.md, elementwise mod 2**64."""
    z = v * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _key_table() -> NDArray[np.int16]:
    x = mix64(np.arange(1, BLOCK + 1, dtype=np.uint64))
    lanes = [((x >> np.uint64(16 * lane)) & np.uint64(0xFFFF)) | np.uint64(1) for lane in range(LANES)]
    return np.stack(lanes, axis=1).astype(np.uint16).view(np.int16)


KEYS = _key_table()  # int16 [1024, 4]
_KEYS_F64 = KEYS.astype(np.float64)
_KEYS_U64 = KEYS.astype(np.int64).view(np.uint64)


def block_keys(blocks: U64, seed: Seed) -> U64:
    """R of each block: u64 [n, 4], values below 2**32."""
    y = mix64(blocks + np.uint64(seed.a))
    z = mix64(blocks + np.uint64(seed.b))
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    return np.stack([y & low, y >> high, z & low, z >> high], axis=1) | np.uint64(1)


def _readings(bits: Bits) -> NDArray[np.int16]:
    """What each lane reads of the elements' 16-bit units, lowest unit first: int16 [units, 4]."""
    units = bits.astype(np.uint16) if bits.dtype.itemsize == 1 else bits.view(np.uint16)
    once = _quadratic(units)
    twice = _quadratic(once << np.uint16(8) | once >> np.uint16(8))
    return np.stack([once, once, twice, twice], axis=1).view(np.int16)


def _quadratic(u: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """u · (2u + 1) mod 2**16, a bijection."""
    return u * (u + u + np.uint16(1))


def _units_per(width: int) -> int:
    return max(1, width // 2)


def _lanes(total: U64) -> U32:
    return (total & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def hash_run(bits: Bits, start: int, seed: Seed) -> U32:
    """Hash of elements start … start+n−1 of a tensor. bits uW [n] → lanes u32 [4]."""
    width = bits_width("bits", bits)
    if start < 0:
        raise ValueError(f"start {start} is negative")
    total = np.zeros(LANES, np.uint64)
    for at in range(0, bits.size, CHUNK):
        total += _hash_units(_readings(bits[at : at + CHUNK]), (start + at) * _units_per(width), seed)
    return _lanes(total)


def _hash_units(readings: NDArray[np.int16], first: int, seed: Seed) -> U64:
    """Unreduced lanes (u64 [4], each a sum mod 2**64) of the units from unit `first` on."""
    lead = first % BLOCK
    blocks = (lead + len(readings) + BLOCK - 1) // BLOCK
    padded = np.zeros((blocks * BLOCK, LANES), np.float64)
    padded[lead : lead + len(readings)] = readings
    # Exact in double: |s·T| ≤ 2**30 and 1024 of them stay below 2**53.
    partial = np.einsum("bul,ul->bl", padded.reshape(blocks, BLOCK, LANES), _KEYS_F64).astype(np.int64).view(np.uint64)
    keys = block_keys(np.arange(blocks, dtype=np.uint64) + np.uint64(first // BLOCK), seed)
    total: U64 = (partial * keys).sum(axis=0, dtype=np.uint64)
    return total


def _hash_scattered(indices: U64, readings: NDArray[np.int64], seed: Seed) -> U64:
    """Unreduced lanes of readings (or differences of readings) int64 [n, 4] at unit indices, in any order."""
    keys = block_keys(indices // np.uint64(BLOCK), seed) * _KEYS_U64[indices % np.uint64(BLOCK)]
    total: U64 = (keys * readings.view(np.uint64)).sum(axis=0, dtype=np.uint64)
    return total


def _unit_indices(elements: U64, width: int) -> U64:
    per = _units_per(width)
    return (elements[:, None] * np.uint64(per) + np.arange(per, dtype=np.uint64)).ravel()


def hash_changes(positions: U32, start: int, old: Bits, new: Bits, seed: Seed) -> U32:
    """What a change from old to new at elements start + positions adds to the hash. → lanes u32 [4]."""
    width = pair_width("old", old, "new", new)
    row("positions", positions, np.uint32, old.size)
    if start < 0:
        raise ValueError(f"start {start} is negative")
    total = np.zeros(LANES, np.uint64)
    for at in range(0, old.size, CHUNK):
        part = slice(at, at + CHUNK)
        difference = _readings(new[part]).astype(np.int64) - _readings(old[part])
        elements = positions[part].astype(np.uint64) + np.uint64(start)
        total += _hash_scattered(_unit_indices(elements, width), difference, seed)
    return _lanes(total)


def memory(address: int, width: int, elements: int) -> Bits:
    """A view of `elements` elements of raw memory. The caller vouches for the address."""
    if width not in WIDTHS:
        raise ValueError(f"width must be 1, 2, 4 or 8 bytes, got {width}")
    if not elements:
        return np.empty(0, WIDTHS[width])
    raw = (ctypes.c_uint8 * (elements * width)).from_address(address)
    return np.ctypeslib.as_array(raw).view(WIDTHS[width])


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
    elements = math.prod(region.sizes)
    reach = sum((n - 1) * s for n, s in zip(region.sizes, region.strides, strict=True)) + 1
    live = memory(address, width, reach if elements else 0)
    total = np.zeros(LANES, np.uint64)
    inner = region.sizes[-1] if region.strides[-1] == 1 and region.source_strides[-1] == 1 else 1
    long_rows = inner >= BLOCK
    outer = region.sizes[:-1] if long_rows else region.sizes
    rows = math.prod(outer) if elements else 0
    for at in range(0, rows, CHUNK):
        places = np.unravel_index(np.arange(at, min(at + CHUNK, rows)), outer) if outer else (np.zeros(1, np.int64),)
        offsets = np.zeros(places[0].size, np.int64)
        sources = np.full(places[0].size, source_offset, np.int64)
        for index, stride, source_stride in zip(places, region.strides, region.source_strides, strict=False):
            offsets += index * stride
            sources += index * source_stride
        if long_rows:
            for offset, source in zip(offsets.tolist(), sources.tolist(), strict=True):
                total += hash_run(live[offset : offset + inner], source, seed)
        else:
            readings = _readings(live[offsets]).astype(np.int64)
            total += _hash_scattered(_unit_indices(sources.astype(np.uint64), width), readings, seed)
    return _lanes(total)
