"""Attacks 51–67: shards and streams whose digests fit, but whose content lies. Outcome of each: a named refusal."""

from __future__ import annotations

import hashlib

import forge
import numpy as np
import pytest
import tiny_log
import zstandard

from vllm_delta_sync import native
from vllm_delta_sync.errors import DigestMismatch, MalformedObject
from vllm_delta_sync.wire import frames, shard
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec

SPEC = TensorSpec("a", "BF16", (1000,))


def block(index: bytes, value: bytes, changed: int, raw: tuple[int, int], codec: int = 1) -> tuple[Block, bytes]:
    digest = hashlib.blake2b(index + value, digest_size=16).digest()
    return Block(0, SPEC, 0, 1000, codec, changed, 0, 0, (len(index), len(value)), raw, digest), index + value


def stream(data: bytes) -> bytes:
    return frames.compress(data)


STEPS = stream(b"\x01\x01")
ATTACKS = {
    "51 a position beyond the block": block(stream(bytes([255, 255, 255, 235, 0])), STEPS, 2, (5, 2)),
    "52 positions that overflow 32 bits": block(stream(b"\xff" * 4), STEPS, 2, (4, 2)),
    "53 an index stream that ends inside a gap": block(stream(b"\x00\xff"), STEPS, 2, (2, 2)),
    "54 bytes left over in the index stream": block(stream(b"\x00\x00\x00"), STEPS, 2, (3, 2)),
    "55 fewer positions than changes": block(stream(b"\x00\x00"), stream(b"\x01" * 3), 3, (2, 3)),
    "56 bytes left over in the steps": block(stream(b"\x00\x00"), stream(b"\x01" * 3), 2, (2, 3)),
    "57 steps that end inside an escape": block(stream(b"\x00\x00"), stream(b"\x01\xff\x00"), 2, (2, 3)),
    "58 a bomb in the index stream": block(stream(bytes(1 << 24)), STEPS, 2, (2, 2)),
    "59 a bomb in the value stream": block(stream(b"\x00\x00"), stream(bytes(1 << 24)), 2, (2, 2)),
    "60 two frames in one stream": block(stream(b"\x00\x00"), STEPS + STEPS, 2, (2, 2)),
    "61 a stream that is no frame": block(b"\x00\x00", STEPS, 2, (2, 2)),
    "62 a frame of unknown size": block(
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\x00\x00"), STEPS, 2, (2, 2)
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_lying_stream_is_refused_by_the_name_of_its_tensor(name: str) -> None:
    with pytest.raises(MalformedObject, match="'a'"):
        decode_block(*ATTACKS[name])


def test_the_block_that_the_attacks_start_from_is_sound() -> None:
    decoded = decode_block(*block(stream(b"\x00\x00"), STEPS, 2, (2, 2)))
    assert decoded.positions.tolist() == [0, 1]


def test_63_a_duplicate_index_cannot_be_written_down() -> None:
    with pytest.raises(ValueError, match="ascend"):
        native.encode_gaps(np.array([5, 5], np.uint32))
    # Gaps count the elements skipped, so the smallest there is still moves on: every stream has ascending positions.
    assert native.decode_gaps(np.zeros(3, np.uint8), 3, 3).tolist() == [0, 1, 2]


def tip_shard(tiny: tiny_log.TinyLog) -> bytes:
    return tiny.object(tiny.log.tip().shards[0].key).read_bytes()


def read_blocks(tiny: tiny_log.TinyLog) -> None:
    log, tip = tiny.log, tiny.log.tip()
    for row, payload in log.block_bytes(tip, log.table(tip)):
        decode_block(row, payload)


def test_64_a_flipped_byte_anywhere_in_a_shard_is_refused_by_its_key(tiny: tiny_log.TinyLog) -> None:
    ref, data = tiny.log.tip().shards[0], tip_shard(tiny)
    for at in (0, 20, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        tiny.object(ref.key).write_bytes(damaged)
        with pytest.raises(DigestMismatch, match=ref.key):
            read_blocks(tiny)


def test_65_a_truncated_or_extended_shard_is_refused_by_its_key(tiny: tiny_log.TinyLog) -> None:
    ref, data = tiny.log.tip().shards[0], tip_shard(tiny)
    for damaged in (b"", data[:-1], data + b"\0"):
        tiny.object(ref.key).write_bytes(damaged)
        with pytest.raises(DigestMismatch, match=ref.key):
            read_blocks(tiny)


def test_66_a_flipped_byte_is_found_by_the_block_when_the_shards_digest_was_forged(tiny: tiny_log.TinyLog) -> None:
    damaged = bytearray(tip_shard(tiny))
    damaged[-1] ^= 1
    forge.replace_tip_shard(tiny, bytes(damaged))
    with pytest.raises(DigestMismatch, match="block"):
        read_blocks(tiny)


def test_67_a_shard_of_another_version_is_refused(tiny: tiny_log.TinyLog) -> None:
    ref, data = tiny.log.tip().shards[0], tip_shard(tiny)
    other, start = shard.pack_shard(tiny.log.run, 2, [data[ref.data_start :]])
    assert start == ref.data_start
    forge.replace_tip_shard(tiny, other)
    with pytest.raises(MalformedObject, match="is not that of run"):
        read_blocks(tiny)
