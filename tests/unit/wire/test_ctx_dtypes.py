"""The ctx codec on every dtype of 1, 2 and 4 bytes: round trips, golden bytes, what steps are, when it is worth it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from table_rows import row_of

from vllm_delta_sync import native
from vllm_delta_sync.log import compose
from vllm_delta_sync.native import Changes, CtxModel
from vllm_delta_sync.wire import codec_rules, ctx, ctx_tiles, dtypes
from vllm_delta_sync.wire.codecs import (
    Context,
    ctx_header,
    ctx_of,
    decode_block,
    decode_tiles,
    dense_block,
    encode_block,
)
from vllm_delta_sync.wire.ctx_order import pattern
from vllm_delta_sync.wire.dtypes import Dtype
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.sparse import gap_abs_block
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

SHAPE = (192, 320)
DTYPES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32", "BOOL"]
Bits = np.ndarray


def weights(dtype: str, seed: int) -> Bits:
    """Values as a tensor of that dtype may hold them, as bits."""
    rng = np.random.default_rng(seed)
    found, size = dtypes.by_name(dtype), SHAPE[0] * SHAPE[1]
    if dtype == "BOOL":
        return rng.integers(0, 2, size).astype(np.uint8)
    if found.integer:
        return rng.normal(0, 30, size).astype(f"i{found.width}").view(found.bits)
    whole = rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
    if dtype == "F32":
        return whole
    if dtype == "F16":
        return whole.view(np.float32).astype(np.float16).view(np.uint16)
    return (whole >> (16 if found.width == 2 else 20)).astype(found.bits)


def update(dtype: str, old: Bits, share: float, seed: int) -> Bits:
    """Some elements go a little up or down."""
    rng = np.random.default_rng(seed)
    found = dtypes.by_name(dtype)
    if dtype == "BOOL":
        return old ^ (rng.random(old.size) < share).astype(np.uint8)
    size = rng.geometric(0.5, old.size) * rng.choice([-1, 1], old.size) * (rng.random(old.size) < share)
    return moved(found, old, size.astype(f"i{found.width}").view(found.bits))


@dataclass
class Coded:
    """One block of one tensor, and what it is coded of."""

    spec: TensorSpec
    old: Bits
    new: Bits
    changes: Changes
    encoded: EncodedBlock


def coded(dtype: str, share: float = 0.02, seed: int = 1) -> Coded:
    spec, old = TensorSpec("w", dtype, SHAPE), weights(dtype, seed)
    new = update(dtype, old, share, seed + 1)
    changes = native.diff(old.copy(), new, advance=False)
    model = ctx.make_model(lambda: iter([ctx.Sample(spec, 0, old, changes, 0)]), 1.0)
    return Coded(spec, old, new, changes, encode_block(spec, changes, 0, old.size, new, Context(model, old, 0)))


@pytest.mark.parametrize("share", [0.02, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_of_every_dtype_go_through_a_table_and_back(dtype: str, share: float) -> None:
    case = coded(dtype, share)
    assert case.encoded.codec == codec_rules.CTX
    without = min(
        gap_abs_block(case.changes.positions, case.changes.new).stored,
        dense_block(case.new, case.encoded.changed).stored,
    )
    assert case.encoded.stored < (0.95 if dtype == "BOOL" else 0.9) * without
    block, payload = row_of(case.spec, case.encoded)
    table = VersionTable((case.spec,), np.zeros((1, 4), np.uint32), (block,))
    decoded = decode_block(VersionTable.from_bytes(table.to_bytes()).blocks[0], payload, case.old)
    np.testing.assert_array_equal(decoded.positions, case.changes.positions)
    np.testing.assert_array_equal(decoded.new_bits(case.changes.old), case.changes.new)


@pytest.mark.parametrize("share", [0.02, 0.4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_held_of_a_block_folds_without_the_values_before(dtype: str, share: float) -> None:
    first = coded(dtype, share)
    second = update(dtype, first.new, share, 9)
    changes = native.diff(first.new.copy(), second, advance=False)
    held = [
        compose.hold(first.spec, 0, first.old.size, first.encoded, first.changes),
        compose.hold(first.spec, 0, first.old.size, encode_block(first.spec, changes, 0, second.size, second), changes),
    ]
    both = compose.then(*(compose.decode(first.spec, one) for one in held))
    folded = compose.encode(first.spec, 0, first.old.size, both)
    assert folded is not None
    change = compose.decode(first.spec, compose.of_fold(folded))
    out = first.old.copy()
    old = out[change.positions]
    if change.values is None:
        assert change.steps is not None
        out[change.positions] = native.apply_steps(old, change.steps)
    else:
        out[change.positions] = change.values
    np.testing.assert_array_equal(out, second)


def plain_model() -> CtxModel:
    """The one of the example in docs/protocol.md."""
    gaps, steps = np.zeros((1, 74), np.uint16), np.zeros((1, 249), np.uint16)
    gaps[0, [0, 1, 72, 73]] = 1024
    steps[0, [0, 1, 248]] = 2048, 1024, 1024
    return native.ctx_model(np.array([255], np.uint8), gaps, steps)


@pytest.mark.parametrize(
    ("dtype", "old", "new"),
    [
        ("BF16", [0x3C00, 0x3C01, 0xBC02, 0x3F80], [0x3C00, 0x3C02, 0xBC03, 0x3F80]),
        ("I8", [0x00, 0x01, 0xFF, 0x40], [0x00, 0x02, 0xFE, 0x40]),
        ("F32", [0x3C000000, 0x3C000001, 0xBC000002, 0], [0x3C000000, 0x3C000002, 0xBC000003, 0]),
    ],
)
def test_two_steps_away_from_zero_are_these_bytes(dtype: str, old: list[int], new: list[int]) -> None:
    kind, grid = dtypes.by_name(dtype), ctx_tiles.grid((4,), 0, 4, 0, 4)
    before, after = (pattern(kind, np.array(bits, kind.bits)) for bits in (old, new))
    coded = native.ctx_encode(plain_model(), before, grid, native.diff(before, after, advance=False), 100)
    assert coded is not None and coded[1].hex(" ") == "00 84 00 01"


def moved(kind: Dtype, bits: np.ndarray, step: np.ndarray) -> np.ndarray:
    """What a step makes of bits: it counts places in the order of patterns."""
    ordered = partial(pattern, dtypes.by_name({1: "I8", 2: "I16", 4: "I32"}[bits.itemsize]))
    return pattern(kind, ordered(ordered(pattern(kind, bits)) + step))


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 31), (1 << 31) - 1))
def test_a_step_of_an_integer_is_the_difference_and_its_pattern_has_its_sign_and_size(value: int, step: int) -> None:
    for dtype, width in (("I8", 1), ("I16", 2), ("I32", 4), ("U8", 1)):
        kind = dtypes.by_name(dtype)
        bits = np.array([value % (1 << 8 * width)], kind.bits)
        after = moved(kind, bits, np.array([step % (1 << 8 * width)], kind.bits))
        assert int(after[0]) == (value + step) % (1 << 8 * width)
        signed = int(bits.view(f"i{width}")[0])
        assert int(pattern(kind, bits)[0]) == (signed if signed >= 0 else (1 << 8 * width - 1) - signed - 1)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_step_of_a_float_is_the_next_one(value: float) -> None:
    old = np.array([value], np.float32)
    assume(value != 0 and abs(value) < 3e38)  # there are two zeros, and beyond the largest is infinity
    after = moved(dtypes.by_name("F32"), old.view(np.uint32), np.array([1], np.uint32)).view(np.float32)
    assert after[0] == np.nextafter(old, np.float32(np.inf))[0]


@pytest.mark.parametrize("place", [0, 40, 191])
def test_a_single_change_is_coded_wherever_it_is(place: int) -> None:
    """Also where the model has seen none of it: it is made from some of a block's strips."""
    spec, old = TensorSpec("w", "BF16", SHAPE), weights("BF16", 3)
    new = old.copy()
    new[place * SHAPE[1]] += np.uint16(1)
    changes = native.diff(old.copy(), new, advance=False)
    model = ctx.make_model(lambda: iter([ctx.Sample(spec, 0, old, changes, 0)]), 1.0)
    found = ctx_of(spec, changes, 0, Context(model, old, 0))
    assert found is not None
    header = ctx_header(spec, 0, old.size, found, "w")
    decoded = decode_tiles(header, found, old, np.ones(header.grid.tiles, np.uint8), "w")
    assert decoded.positions.tolist() == [place * SHAPE[1]]


RATES = st.sampled_from([3e-8, 1e-6, 2e-5, 3e-4, 1e-2])


@given(
    shape=st.sampled_from([(1,), (7,), (576,), (100, 33), (64, 576), (576, 64), (3, 96, 40)]),
    rate=RATES,
    seed=st.integers(0, 1 << 16),
    dtype=st.sampled_from(["BF16", "F16", "F32", "F8_E4M3"]),
    dim=st.integers(0, 2),
)
def test_a_tensor_never_takes_more_than_as_gaps_or_dense(
    shape: tuple[int, ...], rate: float, seed: int, dtype: str, dim: int
) -> None:
    """A model is made of all four tensors, so that the one looked at need not be like the others."""
    spec, rng = TensorSpec("w", dtype, shape), np.random.default_rng(seed)
    kind, size = dtypes.by_name(dtype), spec.numel

    def as_bits(values: Bits) -> Bits:
        return (values.astype(np.float32).view(np.uint32) >> (32 - 8 * kind.width)).astype(kind.bits)

    master = rng.normal(0, 0.02, size)
    pairs = [(as_bits(master), as_bits(master + rng.normal(0, step, size))) for step in (rate, rate, 1e-4, 1e-6)]
    pairs[0][1][rng.random(size) < 0.1] ^= kind.bits.type(1)
    samples = [(old, native.diff(old.copy(), new, advance=False)) for old, new in pairs]
    samples = [(old, changes) for old, changes in samples if changes.positions.size]
    assume(samples)
    cut = dim % len(shape)
    model = ctx.make_model(lambda: (ctx.Sample(spec, 0, old, changes, cut) for old, changes in samples), 1.0)
    old, changes = samples[0]
    new = old.copy()
    new[changes.positions] = changes.new
    found = encode_block(spec, changes, 0, size, new, Context(model, old, cut))
    best = min(encode_block(spec, changes, 0, size, new).stored, dense_block(new, size).stored)
    assert found.stored <= best


def test_a_dtype_of_eight_bytes_has_no_model() -> None:
    spec = TensorSpec("w", "F64", (64,))
    old = np.arange(64, dtype=np.uint64)
    changes = native.diff(old.copy(), old + np.uint64(1), advance=False)
    assert ctx.make_models([ctx.Sample(spec, 0, old, changes, 0)], lambda sample: sample) == {}
