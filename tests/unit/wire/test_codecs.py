"""A block decodes to exactly the changes that were encoded, in the smallest codec, for every dtype."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_rows import row_of

from vllm_delta_sync import native
from vllm_delta_sync.errors import DigestMismatch
from vllm_delta_sync.wire import codec_rules, dtypes
from vllm_delta_sync.wire.codecs import decode_block, decode_encoded, encode_block
from vllm_delta_sync.wire.encoded import Bits, EncodedBlock
from vllm_delta_sync.wire.sparse import bitmapped, gap_block, gap_of
from vllm_delta_sync.wire.tensors import TensorSpec

NAMES = [dtypes.by_code(code).name for code in range(1, 13)]


def round_trip(spec: TensorSpec, old: Bits, new: Bits) -> EncodedBlock:
    """Encode old → new as one block, decode, apply, compare; returns the block."""
    changes = native.diff(old.copy(), new, advance=False)
    encoded = encode_block(spec, changes, 0, spec.numel, new)
    decoded = decode_block(*row_of(spec, encoded))
    out = old.copy()
    out[decoded.positions] = decoded.new_bits(old[decoded.positions])
    np.testing.assert_array_equal(out, new)
    assert encoded.stored <= spec.nbytes
    return encoded


@st.composite
def changed_bits(draw: st.DrawFn) -> tuple[TensorSpec, Bits, Bits]:
    dtype = dtypes.by_name(draw(st.sampled_from(NAMES)))
    shape = draw(st.sampled_from([(), (1,), (7,), (3, 5), (40, 50), (2, 3, 257)]))
    spec = TensorSpec("t", dtype.name, shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, spec.nbytes, np.uint8).view(dtype.bits)
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    wide = draw(st.booleans())
    noise = rng.integers(1, 256, spec.nbytes, np.uint8).view(dtype.bits) if wide else dtype.bits.type(1)
    new = np.where(rng.random(spec.numel) < share, old ^ noise, old).astype(dtype.bits)
    new[draw(st.integers(0, spec.numel - 1))] ^= dtype.bits.type(1 << (8 * dtype.width - 1))
    if (new == old).all():
        new[0] ^= dtype.bits.type(1)
    return spec, old, new


@given(changed_bits())
def test_encode_decode_apply_gives_the_new_bits(case: tuple[TensorSpec, Bits, Bits]) -> None:
    round_trip(*case)


def test_every_pair_of_special_halves_survives() -> None:
    special = np.array(
        [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80, 0xBF80], np.uint16
    )
    old, new = (grid.reshape(-1) for grid in np.meshgrid(special, special))
    keep = old != new
    for name in ("BF16", "F16"):
        # Among many small steps, so that steps are the smallest codec.
        pair = [np.concatenate(parts) for parts in zip((old[keep], new[keep]), small_steps(40_000, 0.1), strict=True)]
        assert round_trip(TensorSpec("t", name, (len(pair[0]),)), *pair).codec == codec_rules.GAP


def small_steps(count: int, share: float) -> tuple[Bits, Bits]:
    rng = np.random.default_rng(1)
    old = rng.integers(0x3C00, 0x3E00, count).astype(np.uint16)
    return old, np.where(rng.random(count) < share, old + 1, old).astype(np.uint16)


def test_small_steps_of_halves_are_coded_as_gaps_below_two_bytes_a_change() -> None:
    encoded = round_trip(TensorSpec("t", "BF16", (1 << 18,)), *small_steps(1 << 18, 0.01))
    assert encoded.codec == codec_rules.GAP
    assert encoded.stored < 1.2 * encoded.changed


@pytest.mark.parametrize(("share", "codec"), [(0.01, "gap"), (0.1, "gap"), (0.25, "bitmap"), (0.5, "bitmap")])
def test_crowded_changes_have_a_bitmap(share: float, codec: str) -> None:
    spec = TensorSpec("t", "BF16", (1 << 16,))
    old, new = small_steps(spec.numel, share)
    encoded = round_trip(spec, old, new)
    assert codec_rules.NAMES[encoded.codec] == codec
    changes = native.diff(old, new, advance=False)
    gaps = gap_of(changes)
    assert encoded.stored == min(gaps.stored, bitmapped(gaps, changes.positions, spec.numel).stored)
    halved = round_trip(TensorSpec("t", "F8_E4M3", (1 << 16,)), old.astype(np.uint8), new.astype(np.uint8))
    assert codec_rules.NAMES[halved.codec] == codec + "-abs"


@given(st.sets(st.integers(0, 999), min_size=1), st.integers(1000, 1010))
def test_a_bitmap_tells_the_positions_it_was_made_of(positions: set[int], count: int) -> None:
    where = np.array(sorted(positions), np.uint32)
    block = bitmapped(gap_block(where, np.ones(where.size, np.uint16)), where, count)
    assert block.raw[0] == -(-count // 8)
    np.testing.assert_array_equal(
        decode_encoded(TensorSpec("t", "BF16", (count,)), 0, count, block, "t").positions, where
    )


def test_wider_types_are_coded_as_values() -> None:
    old = np.arange(4000, dtype=np.uint32)
    new = old.copy()
    new[::40] += 1
    assert round_trip(TensorSpec("t", "F32", (4000,)), old, new).codec == codec_rules.GAP_ABS


def test_halves_reset_to_one_value_are_coded_as_values() -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(1, 1 << 16, 1 << 14).astype(np.uint16)
    new = old.copy()
    new[::3] = 0
    assert round_trip(TensorSpec("t", "BF16", (1 << 14,)), old, new).codec == codec_rules.GAP_ABS


def test_a_block_that_changed_beyond_recognition_is_dense_and_no_larger_than_its_copy() -> None:
    rng = np.random.default_rng(3)
    old, new = (rng.integers(0, 1 << 16, 4096).astype(np.uint16) for _ in range(2))
    encoded = round_trip(TensorSpec("t", "BF16", (4096,)), old, new)
    assert (encoded.codec, encoded.stored, encoded.raw) == (codec_rules.DENSE, 8192, (0, 8192))
    assert encoded.changed == int((old != new).sum())


def test_a_dense_block_at_an_odd_byte_of_its_shard_is_decoded_aligned() -> None:
    rng = np.random.default_rng(3)
    spec = TensorSpec("t", "F32", (64,))
    old, new = (rng.integers(0, 1 << 32, 64).astype(np.uint32) for _ in range(2))
    encoded = round_trip(spec, old, new)
    assert encoded.codec == codec_rules.DENSE
    shard = b"\0" + encoded.value
    values = decode_block(row_of(spec, encoded, count=64)[0], memoryview(shard)[1:]).values
    assert values is not None and values.flags.aligned
    np.testing.assert_array_equal(values, new)
    native.diff(old, values, advance=False)


def test_a_flipped_bit_anywhere_in_a_block_is_a_digest_mismatch() -> None:
    spec = TensorSpec("t", "BF16", (1000,))
    old, new = small_steps(1000, 0.05)
    encoded = round_trip(spec, old, new)
    payload = encoded.index + encoded.value
    block, _ = row_of(spec, encoded, count=1000)
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(DigestMismatch, match="'t'"):
            decode_block(block, damaged)
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(DigestMismatch):
            decode_block(block, wrong)


def test_threads_encode_and_decode_independently() -> None:
    failures: list[BaseException] = []

    def work(share: float) -> None:
        try:
            for _ in range(5):
                round_trip(TensorSpec("t", "BF16", (20_000,)), *small_steps(20_000, share))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(share,)) for share in (0.01, 0.05, 0.2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
