"""Attacks 51–67, 109, 112, 135–138: shards and streams whose digests fit, but which lie. Outcome: a named refusal."""

from __future__ import annotations

import hashlib

import forge
import numpy as np
import pytest
import tiny_log
import zstandard

from vllm_delta_sync import native
from vllm_delta_sync.errors import DigestMismatch, MalformedObject
from vllm_delta_sync.wire import container, frames, shard
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.table import Block, VersionTable
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
    "135 a bitmap with a bit set beyond the block": block(stream(bytes([1, *[0] * 124, 1])), STEPS, 2, (126, 2), 4),
    "136 a bitmap with more bits set than changes": block(stream(bytes([7, *[0] * 124])), STEPS, 2, (125, 2), 4),
    "137 a bitmap with fewer bits set than changes": block(stream(bytes(125)), STEPS, 2, (125, 2), 4),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_lying_stream_is_refused_by_the_name_of_its_tensor(name: str) -> None:
    with pytest.raises(MalformedObject, match="'a'"):
        decode_block(*ATTACKS[name])


def test_the_block_that_the_attacks_start_from_is_sound() -> None:
    decoded = decode_block(*block(stream(b"\x00\x00"), STEPS, 2, (2, 2)))
    assert decoded.positions.tolist() == [0, 1]
    decoded = decode_block(*block(stream(bytes([3, *[0] * 124])), STEPS, 2, (125, 2), 4))
    assert decoded.positions.tolist() == [0, 1]


def test_138_a_bitmap_that_is_not_a_bit_for_each_element_is_refused_with_its_table() -> None:
    for size in (124, 126, 1 << 24):
        row, _ = block(stream(bytes(4)), STEPS, 2, (size, 2), 4)
        table = VersionTable((SPEC,), np.zeros((1, 4), np.uint32), (row,))
        with pytest.raises(MalformedObject, match="a bit for each element"):
            VersionTable.from_bytes(table.to_bytes())


def test_52_positions_that_overflow_32_bits_are_refused() -> None:
    largest = 2**31 - 1  # elements of a block
    signed = np.full(largest // 255 + 1, 255, np.uint8)
    signed[-1] = 254
    assert 255 * (signed.size - 1) + 254 >= 2**31  # below 0, and so "inside the block", for whoever counts in int32
    with pytest.raises(MalformedObject, match="outside the block"):
        native.decode_gaps(signed, 1, largest)
    wrapping = np.full(2**32 // 255 + 1, 255, np.uint8)
    wrapping[-1] = 2
    assert (255 * (wrapping.size - 1) + 2) % 2**32 < 255  # back at the start, for whoever counts in uint32
    with pytest.raises(MalformedObject, match="cannot hold"):
        native.decode_gaps(wrapping, 1, largest)


def test_63_a_duplicate_index_cannot_be_written_down() -> None:
    with pytest.raises(ValueError, match="ascend"):
        native.encode_gaps(np.array([5, 5], np.uint32))
    # Gaps count the elements skipped, so the smallest there is still moves on: every stream has ascending positions.
    assert native.decode_gaps(np.zeros(3, np.uint8), 3, 3).tolist() == [0, 1, 2]


def tip_shard(tiny: tiny_log.TinyLog) -> bytes:
    return tiny.object(tiny.log.tip().shards[0].key).read_bytes()


def read_blocks(tiny: tiny_log.TinyLog) -> None:
    log, tip = tiny.log, tiny.log.tip()
    for row, payload in log.blocks(tip, log.table(tip).blocks):
        decode_block(row, payload)


def test_64_a_flipped_byte_anywhere_in_a_shard_is_refused_by_its_key(tiny: tiny_log.TinyLog) -> None:
    ref, data = tiny.log.tip().shards[0], tip_shard(tiny)
    for at in (0, 20, ref.data_start, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        tiny.object(ref.key).write_bytes(damaged)
        with pytest.raises(DigestMismatch, match=ref.key):
            read_blocks(tiny)


def test_65_a_truncated_or_extended_shard_is_refused_by_its_key(tiny: tiny_log.TinyLog) -> None:
    ref, data = tiny.log.tip().shards[0], tip_shard(tiny)
    for damaged in (data[: ref.data_start], data[:-1], data + b"\0"):
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
    tip, data = tiny.log.tip(), tip_shard(tiny)
    parts = [data[tip.shards[0].data_start :]], data[tip.table.start : tip.shards[0].data_start]
    for ends in (Ends(tip.run, 1, 2), Ends(tip.run, 1, 3), Ends("0" * 32, 2, 3)):
        other, start = shard.pack_shard(ends, *parts)
        assert start == tip.shards[0].data_start
        forge.replace_tip_shard(tiny, other)
        with pytest.raises(MalformedObject, match="is not that of run"):
            read_blocks(tiny)


def test_109_a_flood_in_a_shards_header_is_refused_and_not_echoed(
    tiny: tiny_log.TinyLog,
) -> None:
    tip, data = tiny.log.tip(), tip_shard(tiny)
    sizes = [("table", "U8", (tip.table.size,)), ("blocks", "U8", (len(data) - tip.shards[0].data_start,))]
    for size, message in ((1 << 20, "header of"), (1 << 19, "is not that of run")):
        head = container.layout(sizes, {"flood": "x" * size})
        table = tip.table.model_dump() | {"start": len(head)}
        flooded, start = head + data[tip.table.start :], len(head) + tip.table.size
        forge.replace_tip_shard(tiny, flooded, table=table, data_start=start)
        with pytest.raises(MalformedObject, match=message) as caught:
            read_blocks(tiny)
        assert len(str(caught.value)) < 1000


def test_112_a_table_that_is_not_where_the_shard_has_it_is_refused_by_whoever_reads_the_whole(
    tiny: tiny_log.TinyLog,
) -> None:
    tip, data, rows = tiny.log.tip(), tip_shard(tiny), tiny.log.table(tiny.log.tip()).blocks
    start, end = tip.table.start - 8, tip.shards[0].data_start
    forge.replace_tip(tiny, table={"start": start, "size": end - start, "sha256": forge.sha256(data[start:end])})
    with pytest.raises(MalformedObject, match="its table is at"):
        list(tiny.log.blocks(tiny.log.tip(), rows))
