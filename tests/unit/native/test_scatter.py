"""Gather and scatter on live memory: all of it is written, or none of it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


class Update:
    """A random update over two live arrays, in three segments with a gap that no segment covers."""

    def __init__(self, dtype: type, n: int, key: int = 0) -> None:
        rng = np.random.default_rng(key)
        self.live = [rng.integers(0, 250, 3 * n + 50).astype(dtype) for _ in range(2)]
        a, b, c = n // 3, n // 2, n // 2 + n // 5
        self.bounds = [(0, 0, a), (1, b, c), (0, c, n)]
        self.offsets = np.zeros(n, np.uint32)
        self.expected = np.zeros(n, dtype)
        places = rng.permutation(3 * n)  # distinct, over both segments of the first array
        for array, first, last in self.bounds:
            self.offsets[first:last] = np.sort(places[first:last])
            self.expected[first:last] = self.live[array][self.offsets[first:last] + 50 // self.live[0].itemsize]
        self.values = (self.expected + 1).astype(dtype)
        base = [array.ctypes.data + 50 // array.itemsize * array.itemsize for array in self.live]
        self.segments = np.array([(base[s], first, last, 0) for s, first, last in self.bounds], np.int64)
        self.before = [array.copy() for array in self.live]

    def wanted(self) -> list[np.ndarray]:
        after = [array.copy() for array in self.before]
        for array, first, last in self.bounds:
            after[array][self.offsets[first:last] + 50 // self.live[0].itemsize] = self.values[first:last]
        return after

    def run(self, native: ModuleType, threads: int) -> int:
        index: int = native.scatter(self.segments, self.offsets, self.expected, self.values, threads=threads)
        return index


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("n", [10, 5000])
def test_a_scatter_writes_every_value_and_nothing_else(native: ModuleType, dtype: type, n: int) -> None:
    update = Update(dtype, n)
    assert update.run(native, threads=1) == -1
    assert same(update.live, update.wanted())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_write_the_same_bits(native: ModuleType, threads: int) -> None:
    update = Update(np.uint16, 400_000)
    assert update.run(native, threads) == -1
    assert same(update.live, update.wanted())


@quick
@given(stray=st.integers(0, 299), key=st.integers(0, 100))
def test_a_stray_live_element_is_reported_and_nothing_is_left_written(native: ModuleType, stray: int, key: int) -> None:
    update = Update(np.uint16, 300, key)
    update.expected[stray] ^= 0x100
    covered = any(first <= stray < last for _, first, last in update.bounds)
    assert update.run(native, threads=1) == (stray if covered else -1)
    assert same(update.live, update.before if covered else update.wanted())


@pytest.mark.parametrize("strays", [(0,), (399_999,), (250_000, 399_000), (90_000, 130_000, 300_000)])
def test_the_first_stray_of_all_threads_is_reported_and_all_threads_roll_back(
    native: ModuleType, strays: tuple[int, ...]
) -> None:
    update = Update(np.uint16, 400_000)
    update.expected[list(strays)] ^= 0x100
    assert update.run(native, threads=4) == min(strays)
    assert same(update.live, update.before)


def test_a_stray_that_already_holds_the_new_value_is_a_stray(native: ModuleType) -> None:
    live = np.array([1, 2, 3], np.uint16)
    segments = np.array([[live.ctypes.data, 0, 3, 0]], np.int64)
    old, new = np.array([1, 5, 3], np.uint16), np.array([9, 2, 8], np.uint16)
    assert native.scatter(segments, np.arange(3, dtype=np.uint32), old, new, threads=1) == 1
    assert live.tolist() == [1, 2, 3]


def test_an_update_without_segments_writes_nothing(native: ModuleType) -> None:
    nothing = np.empty(0, np.uint16)
    segments = np.empty((0, 4), np.int64)
    assert native.scatter(segments, np.empty(0, np.uint32), nothing, nothing, threads=2) == -1


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([[0, 0, 4, 0]], ValueError),  # past the end
        ([[0, -1, 2, 0]], ValueError),
        ([[0, 2, 1, 0]], ValueError),
        ([[0, 0, 2, 0], [0, 1, 3, 0]], ValueError),  # overlap
        ([[0, 0, 2, 7]], ValueError),  # reserved
        ([[0, 0, 2]], TypeError),
    ],
)
def test_segments_out_of_order_or_bounds_are_refused(native: ModuleType, rows: list[list[int]], error: type) -> None:
    three = np.zeros(3, np.uint16)
    with pytest.raises(error):
        native.scatter(np.array(rows, np.int64), np.zeros(3, np.uint32), three, three, threads=1)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_gather_reads_what_lies_at_the_offsets(native: ModuleType, dtype: type) -> None:
    live = np.arange(200).astype(dtype)
    offsets = np.array([199, 0, 7, 7, 100], np.uint32)
    assert np.array_equal(native.gather(live.ctypes.data, live.itemsize, offsets), live[offsets])
    assert native.gather(live.ctypes.data, live.itemsize, offsets[:0]).size == 0
    with pytest.raises(ValueError, match="width"):
        native.gather(live.ctypes.data, 3, offsets)
