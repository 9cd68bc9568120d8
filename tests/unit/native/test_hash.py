"""The state hash: its definition, its additivity, and every way of computing it."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_delta_sync.native import Seed

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]
SEED = Seed(0xFFFF_FFFF_FFFF_FF00, 0x0123_4567_89AB_CDEF)
M64 = 2**64 - 1


def _mix64(v: int) -> int:
    z = v * 0x9E3779B97F4A7C15 & M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def _quadratic(u: int) -> int:
    return u * (2 * u + 1) & 0xFFFF


def by_definition(bits: np.ndarray, start: int, seed: Seed) -> list[int]:
    """docs/protocol.md, *State hash*, a unit at a time in Python integers."""
    if bits.itemsize == 1:
        units, first = [int(u) for u in bits], start
    else:
        units, first = [int(u) for u in bits.view(np.uint16)], start * (bits.itemsize // 2)
    lanes = [0] * 4
    for i, u in enumerate(units, first):
        once = _quadratic(u)
        twice = _quadratic(once << 8 & 0xFFFF | once >> 8)
        y, z = _mix64(seed.a + i // 1024 & M64), _mix64(seed.b + i // 1024 & M64)
        x = _mix64(i % 1024 + 1)
        for lane, r in enumerate([y & 0xFFFFFFFF, y >> 32, z & 0xFFFFFFFF, z >> 32]):
            t = x >> 16 * lane & 0xFFFF | 1
            t -= (t & 0x8000) << 1
            s = once if lane < 2 else twice
            s -= (s & 0x8000) << 1
            lanes[lane] = lanes[lane] + (r | 1) * t * s & 0xFFFFFFFF
    return lanes


def random_bits(dtype: type, size: int, key: int = 0) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_the_hash_is_the_one_of_the_protocol(native: ModuleType, dtype: type) -> None:
    bits = random_bits(dtype, 2100)
    assert native.hash_run(bits, 517, SEED).tolist() == by_definition(bits, 517, SEED)


def test_the_most_negative_units_do_not_saturate(native: ModuleType) -> None:
    bits = np.full(3000, 0x8000, np.uint16)
    assert native.hash_run(bits, 0, SEED).tolist() == by_definition(bits, 0, SEED)


def test_positions_beyond_32_bits_count(native: ModuleType) -> None:
    bits = random_bits(np.uint16, 40)
    start = 2**40 + 1000
    assert native.hash_run(bits, start, SEED).tolist() == by_definition(bits, start, SEED)
    assert native.hash_run(bits, start, SEED).tolist() != native.hash_run(bits, 1000, SEED).tolist()


@pytest.mark.parametrize("dtype", WIDTHS)
@quick
@given(cuts=st.lists(st.integers(0, 5000), max_size=5), start=st.integers(0, 3000))
def test_the_hash_of_the_parts_is_the_hash_of_the_whole(
    native: ModuleType, dtype: type, cuts: list[int], start: int
) -> None:
    bits = random_bits(dtype, 5000)
    edges = [0, *sorted(cuts), 5000]
    parts = [native.hash_run(bits[a:b], start + a, SEED) for a, b in pairwise(edges)]
    assert np.array_equal(np.sum(parts, axis=0, dtype=np.uint32), native.hash_run(bits, start, SEED))


@pytest.mark.parametrize("dtype", WIDTHS)
@quick
@given(key=st.integers(0, 1000), start=st.integers(0, 2**33), density=st.floats(0, 1))
def test_a_change_adds_its_difference(native: ModuleType, dtype: type, key: int, start: int, density: float) -> None:
    old, new = random_bits(dtype, 1500, key), random_bits(dtype, 1500, key + 1)
    where = np.flatnonzero(np.random.default_rng(key).random(1500) < density).astype(np.uint32)
    after = old.copy()
    after[where] = new[where]
    effect = native.hash_changes(where, start, old[where], new[where], SEED)
    assert np.array_equal(native.hash_run(old, start, SEED) + effect, native.hash_run(after, start, SEED))


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(
    ("shape", "take", "order"),
    [
        ((7, 300), (slice(2, 6), slice(10, 200)), (0, 1)),  # a box of rows and columns
        ((3, 2500), (slice(0, 3), slice(0, 2500)), (0, 1)),  # whole
        ((40, 50), (slice(0, 40), slice(5, 45)), (1, 0)),  # transposed in memory
        ((4, 5, 600), (slice(1, 4), slice(0, 5), slice(0, 590)), (1, 0, 2)),  # outer dimensions swapped
        ((4, 5, 6), (slice(1, 2), slice(0, 5), slice(5, 6)), (2, 1, 0)),
        ((9, 9), (slice(0, 0), slice(0, 9)), (0, 1)),  # empty
        ((6, 1000), (slice(0, 6), slice(0, 1000, 7)), (0, 1)),  # every seventh column
    ],
)
def test_a_strided_box_hashes_as_its_elements_do(
    native: ModuleType, dtype: type, shape: tuple[int, ...], take: tuple[slice, ...], order: tuple[int, ...]
) -> None:
    tensor = random_bits(dtype, int(np.prod(shape))).reshape(shape)
    width = tensor.itemsize
    source = tensor[take]
    backing = np.ascontiguousarray(source.transpose(order))
    live = backing.transpose(np.argsort(order))
    offset = (source.ctypes.data - tensor.ctypes.data) // width if source.size else 0
    lanes = native.hash_strided(
        live.ctypes.data, width, live.shape, [s // width for s in live.strides], offset,
        [s // width for s in source.strides], SEED,
    )  # fmt: skip
    want = np.zeros(4, np.uint32)
    index = np.arange(tensor.size).reshape(shape)[take].ravel()
    for element, bits in zip(index.tolist(), source.reshape(-1, 1), strict=True):
        want += native.hash_run(np.ascontiguousarray(bits), element, SEED)
    assert np.array_equal(lanes, want)


def test_a_long_run_hashes_as_its_short_parts_do(native: ModuleType) -> None:
    bits = random_bits(np.uint16, 150_001)
    parts = [native.hash_run(bits[a : a + 999], 5 + a, SEED) for a in range(0, bits.size, 999)]
    assert np.array_equal(np.sum(parts, axis=0, dtype=np.uint32), native.hash_run(bits, 5, SEED))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_one_flipped_bit_changes_every_lane(native: ModuleType, dtype: type) -> None:
    bits = random_bits(dtype, 2000)
    before = native.hash_run(bits, 0, SEED)
    for at, bit in ((0, 0), (1023, 7), (1999, 3)):
        bits[at] ^= dtype(1 << bit)
        assert (native.hash_run(bits, 0, SEED) != before).all()
        bits[at] ^= dtype(1 << bit)


def test_the_read_probe_sums_whole_words(native: ModuleType) -> None:
    data = random_bits(np.uint8, 8 * 1000 + 5)
    assert native.read_sum(data) == int(data[:8000].view(np.uint64).sum(dtype=np.uint64))


def test_a_step_from_a_wrong_old_value_has_another_effect(native: ModuleType) -> None:
    right = np.arange(0x3C00, 0x3C80, dtype=np.uint16)
    steps = np.full(right.size, 1, np.uint16)
    positions = np.zeros(1, np.uint32)
    for bit in range(14):
        for at in range(0, right.size, 32):
            old = right[at : at + 1]
            wrong = old ^ np.uint16(1 << bit)
            effects = [
                native.hash_changes(positions, 7, value, native.apply_steps(value, steps[at : at + 1]), SEED)
                for value in (old, wrong)
            ]
            assert (effects[0] != effects[1]).any()
