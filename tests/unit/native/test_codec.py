"""Diff, gap stream, step stream and map: what goes in comes out, and garbage is refused."""

from __future__ import annotations

import signal
import struct
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.native.special import SPECIAL
from vllm_delta_sync.errors import MalformedObject

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
bf16 = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))
bf16_rows = st.lists(st.tuples(bf16, bf16), max_size=300).map(
    lambda pairs: (np.array([a for a, _ in pairs], np.uint16), np.array([b for _, b in pairs], np.uint16))
)


@quick
@given(rows=bf16_rows)
def test_diff_encode_decode_apply_gives_the_new_bits(native: ModuleType, rows: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = rows
    changes = native.diff(old.copy(), new, advance=False)
    positions = native.decode_gaps(native.encode_gaps(changes.positions), changes.positions.size, old.size)
    steps = native.decode_steps(native.encode_steps(changes.old, changes.new), changes.old.size)
    served = old.copy()
    served[positions] = native.apply_steps(served[positions], steps)
    assert np.array_equal(served, new)
    assert np.array_equal(positions, np.flatnonzero(old != new))


@pytest.mark.parametrize("changed", [0, 1, 255, 4096, 5000], ids=lambda n: f"{n}-of-5000")
def test_empty_and_full_deltas_survive(native: ModuleType, changed: int) -> None:
    old = np.arange(5000, dtype=np.uint16)
    new = old.copy()
    new[:changed] ^= 0x8000
    found = native.diff(old.copy(), new, advance=False)
    assert np.array_equal(native.decode_gaps(native.encode_gaps(found.positions), changed, 5000), np.arange(changed))
    steps = native.decode_steps(native.encode_steps(found.old, found.new), changed)
    assert np.array_equal(native.apply_steps(found.old, steps), new[:changed])


def test_the_step_code_is_a_bijection_over_all_bit_patterns(native: ModuleType) -> None:
    everything = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    for old in (0x0000, 0x8000, 0x7FFF, 0xFFFF, 0x3F80):
        before = np.full(0xFFFF, old, np.uint16)
        after = everything[everything != old]
        steps = native.decode_steps(native.encode_steps(before, after), after.size)
        assert np.array_equal(native.apply_steps(before, steps), after)


def test_the_step_stream_is_the_one_of_the_protocol(native: ModuleType) -> None:
    # k(−0.0) = −1, so from +0.0 it is one step down: z = 1, byte 0. One step up: z = 2, byte 1. z = 256: escaped.
    old = np.array([0x0000, 0x0000, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x0001, 0x3F80 + 128], np.uint16)
    assert native.encode_steps(old, new).tobytes() == bytes([0, 1, 255]) + struct.pack("<H", 256)


def test_the_gap_stream_is_the_one_of_the_protocol(native: ModuleType) -> None:
    stream = native.encode_gaps(np.array([0, 1, 257, 513, 1024], np.uint32))
    assert stream.tobytes() == bytes([0, 0, 255, 0, 255, 0, 255, 255, 0])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 300_000])
def test_diff_advances_the_snapshot_and_keeps_both_sides(native: ModuleType, dtype: type, size: int) -> None:
    rng = np.random.default_rng(size)
    old = rng.integers(0, 250, size).astype(dtype)
    new = old.copy()
    touched = np.flatnonzero(rng.random(size) < 0.6)
    new[touched] += 1
    snapshot = old.copy()
    changes = native.diff(snapshot, new, advance=True)
    assert np.array_equal(snapshot, new)
    assert np.array_equal(changes.positions, touched)
    assert np.array_equal(changes.old, old[touched]) and np.array_equal(changes.new, new[touched])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_diff_for_whose_result_there_is_no_memory_leaves_the_snapshot(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    def out_of_memory(*arrays: object) -> None:
        raise MemoryError

    old = np.zeros(300_000, f"u{width}")  # more changes than one call into C writes down
    snapshot = old.copy()
    with monkeypatch.context() as patch:
        patch.setattr(native, "CHUNK", 1 << 16, raising=False)
        patch.setattr(np, "concatenate", out_of_memory)
        with pytest.raises(MemoryError):
            native.diff(snapshot, old + old.dtype.type(1), advance=True)
    assert np.array_equal(snapshot, old)
    assert native.diff(snapshot, old + old.dtype.type(1), advance=True).positions.size == old.size


def test_a_diff_that_a_signal_ends_leaves_the_snapshot() -> None:
    cpu = pytest.importorskip("vllm_delta_sync.native.cpu")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = np.zeros(1 << 24, np.uint16)
    new, snapshot = old.copy(), old.copy()
    new[::1000] = 1
    handled = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.0003)  # what is compared takes milliseconds
                cpu.diff(snapshot, new, advance=True)
            assert np.array_equal(snapshot, old)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handled)


def test_unaligned_rows_are_refused(native: ModuleType) -> None:
    odd = np.frombuffer(bytes(9), np.uint32, 2, offset=1)
    even = np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="aligned"):
        native.diff(even, odd, advance=False)
    with pytest.raises(ValueError, match="aligned"):
        native.encode_gaps(odd)


@quick
@given(data=st.binary(max_size=400), changed=st.integers(0, 200), count=st.integers(0, 5000))
def test_random_bytes_are_refused_or_are_positions_in_the_block(
    native: ModuleType, data: bytes, changed: int, count: int
) -> None:
    try:
        positions = native.decode_gaps(np.frombuffer(data, np.uint8), changed, count)
    except MalformedObject:
        return
    assert positions.size == changed
    assert (np.diff(positions.astype(np.int64)) > 0).all() and (positions < count).all()
    assert native.encode_gaps(positions).tobytes() == data


@quick
@given(data=st.lists(st.sampled_from([0, 1, 254, 255]), max_size=60).map(bytes), changed=st.integers(0, 60))
def test_random_bytes_are_refused_or_are_the_only_code_of_their_steps(
    native: ModuleType, data: bytes, changed: int
) -> None:
    try:
        steps = native.decode_steps(np.frombuffer(data, np.uint8), changed)
    except MalformedObject:
        return
    old = np.zeros(changed, np.uint16)
    assert native.encode_steps(old, native.apply_steps(old, steps)).tobytes() == data


@pytest.mark.parametrize(
    ("data", "changed", "count"),
    [
        (b"\x00\x00", 1, 10),  # bytes left over
        (b"\x00", 2, 10),  # a gap missing
        (b"\xff", 1, 1000),  # ends inside a gap
        (b"\x0a", 1, 10),  # one past the block
        (b"\xff\xff\x00", 1, 500),  # longer than any gap of this block
        (b"", 1, 0),  # more changed than elements
        (b"", -1, 10),
        (b"", 0, 2**31),  # a block too large
    ],
)
def test_a_broken_gap_stream_is_refused(native: ModuleType, data: bytes, changed: int, count: int) -> None:
    with pytest.raises(MalformedObject, match="gap stream"):
        native.decode_gaps(np.frombuffer(data, np.uint8), changed, count)


@pytest.mark.parametrize(
    ("data", "changed"),
    [
        (b"\x00\x00", 1),
        (b"\x00", 2),
        (b"\xff\x00", 1),  # ends inside an escape
        (b"\xff\xff\x00", 1),  # 255 in three bytes, though one byte could say it
        (b"\xff\x00\x00", 1),  # a step of zero
        (b"", -1),
    ],
)
def test_a_broken_step_stream_is_refused(native: ModuleType, data: bytes, changed: int) -> None:
    with pytest.raises(MalformedObject, match="step stream"):
        native.decode_steps(np.frombuffer(data, np.uint8), changed)


def test_positions_that_do_not_ascend_and_elements_that_did_not_change_are_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="ascend"):
        native.encode_gaps(np.array([3, 3], np.uint32))
    with pytest.raises(ValueError, match="element 1 did not change"):
        native.encode_steps(np.array([1, 2], np.uint16), np.array([2, 2], np.uint16))


def test_arrays_of_other_dtypes_are_refused_before_the_library_sees_them(native: ModuleType) -> None:
    row = np.zeros(4, np.uint16)
    with pytest.raises(TypeError, match="view the bits first"):
        native.diff(row.view(np.float16), row.view(np.float16), advance=False)
    with pytest.raises(ValueError, match="one contiguous row"):
        native.diff(row[::2], row[::2], advance=False)
    with pytest.raises(TypeError, match="must be uint32"):
        native.encode_gaps(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="one dtype and length"):
        native.diff(row, row[:2], advance=False)


def test_a_region_selects_its_elements_and_says_where_they_go(native: ModuleType) -> None:
    # columns 5 … 8 of rows 3 … 5 of a [10, 10] tensor, into a [3, 4] region; the positions begin at element 10
    positions = np.arange(0, 90, 3, dtype=np.uint32)
    selected, targets = native.map_positions(positions, 10, (3, 4), 35, (10, 1), (4, 1))
    grid = np.arange(100).reshape(10, 10)
    box = grid[3:6, 5:9].ravel().tolist()
    want = [(i, box.index(p + 10)) for i, p in enumerate(positions.tolist()) if p + 10 in box]
    assert list(zip(selected.tolist(), targets.tolist(), strict=True)) == want
    assert selected.dtype == np.uint32 and targets.dtype == np.int64


@quick
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)),
    box=st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 5))] * 3),
    order=st.permutations([0, 1, 2]),
    start=st.integers(0, 30),
)
def test_the_map_agrees_with_slicing_a_numpy_array(
    native: ModuleType, shape: tuple[int, ...], box: list[tuple[int, int]], order: list[int], start: int
) -> None:
    tensor = np.arange(np.prod(shape)).reshape(shape)
    corner = [min(low, n - 1) for (low, _), n in zip(box, shape, strict=True)]
    sizes = [min(size, n - low) for (_, size), n, low in zip(box, shape, corner, strict=True)]
    source_strides = [s // 8 for s in tensor.strides]
    target_strides = [0, 0, 0]
    span = 1
    for d in order:
        target_strides[d] = span
        span *= max(1, sizes[d])
    offset = int(tensor[tuple(corner)])
    positions = np.arange(max(0, tensor.size - start), dtype=np.uint32)
    selected, targets = native.map_positions(positions, start, sizes, offset, source_strides, target_strides)
    want = {}
    for index in np.ndindex(*sizes):
        element = int(tensor[tuple(c + i for c, i in zip(corner, index, strict=True))])
        if element >= start:
            want[element - start] = sum(i * s for i, s in zip(index, target_strides, strict=True))
    assert dict(zip(positions[selected].tolist(), targets.tolist(), strict=True)) == want


def test_a_region_whose_strides_do_not_nest_is_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="do not nest"):
        native.map_positions(np.zeros(1, np.uint32), 0, (4, 3), 0, (2, 1), (3, 1))
