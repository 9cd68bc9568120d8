"""Attacks 01–50, 110–111, 113–115: tables and containers that lie. Outcome: MalformedObject, naming the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import forge
import numpy as np
import pytest
import zstandard

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import columns, container, frames
from vllm_delta_sync.wire.table import MAX_RAW_BYTES, VersionTable


def put(column: str, row: Any, value: Any) -> Callable[[columns.Columns], None]:
    def change(found: columns.Columns) -> None:
        found[column][row] = value

    return change


def swap(column: str, value: Any) -> Callable[[columns.Columns], None]:
    def change(found: columns.Columns) -> None:
        found[column] = value

    return change


def text(names: bytes) -> Any:
    return np.frombuffer(names, np.uint8)


ATTACKS: dict[str, tuple[Callable[[columns.Columns], None], str]] = {
    "01 overlapping blocks": (put("blocks.start", 1, 499), "overlaps"),
    "02 the same block twice": (put("blocks.start", 1, 0), "overlaps"),
    "03 blocks out of order": (put("blocks.tensor", 0, 1), "beyond its tensor|out of order"),
    "04 a block beyond its tensor": (put("blocks.start", 2, 1), "beyond its tensor"),
    "05 a start that wraps around 64 bits": (put("blocks.start", 2, (1 << 64) - 1), "beyond any file"),
    "06 a block of a tensor that is not listed": (put("blocks.tensor", 2, 2), "names tensor 2 of 2"),
    "07 an empty block": (put("blocks.count", 2, 0), "1 to 16777216 elements"),
    "08 no changes in a block": (put("blocks.changed", 0, 0), "1 to its count"),
    "09 more changes than elements": (put("blocks.changed", 1, 501), "1 to its count"),
    "10 an unknown codec": (put("blocks.codec", 0, 6), "codec is not one of"),
    "11 steps of a type that has none": (put("blocks.codec", 2, 1), "BF16 and F16 only"),
    "12 a dense block of the wrong length": (put("blocks.length", (1, 1), 998), "count of elements"),
    "13 a dense block with an index stream": (put("blocks.raw", (1, 0), 1), "no index stream"),
    "14 an index stream that claims gigabytes": (put("blocks.raw", (0, 0), 1 << 40), "cannot be that long"),
    "15 an index stream shorter than its changes": (put("blocks.raw", (0, 0), 49), "cannot be that long"),
    "16 a value stream that claims gigabytes": (put("blocks.raw", (2, 1), 1 << 40), "values take"),
    "17 steps longer than three bytes each": (put("blocks.raw", (0, 1), 151), "one or three bytes"),
    "18 a sparse block much larger than its dense copy": (
        put("blocks.length", (2, 1), 581),
        "larger than its dense copy",
    ),
    "19 two blocks in the same bytes of a shard": (put("blocks.offset", 1, 69), "share bytes"),
    "20 duplicate tensor names": (swap("tensors.names", text(b"a\na\n")), "sorted and unique"),
    "21 a negative size": (put("tensors.shape", 1, -4), "integers >= 0"),
    "22 a shape whose product overflows": (put("tensors.shape", slice(1, 3), 1 << 40), "larger than"),
    "23 an unknown dtype": (put("tensors.dtype", 0, 13), "dtype code 13"),
    "24 names that are not UTF-8": (swap("tensors.names", text(b"a\n\xff\n")), "UTF-8"),
    "25 fewer names than tensors": (swap("tensors.names", text(b"a\n")), "one name"),
    "26 a name without its end": (swap("tensors.names", text(b"a\nb")), "one name"),
    "27 an empty name": (swap("tensors.names", text(b"\nb\n")), "must be 1 to"),
    "28 ranks that do not add up": (put("tensors.rank", 0, 2), "add up"),
    "113 a block that takes gigabytes to decode": (
        put("blocks.count", 2, (1 << 24) + 1),
        "1 to 16777216 elements",
    ),
    "114 more tensors than any model has": (swap("tensors.dtype", np.ones((1 << 19) + 1, np.uint8)), "at most 524288"),
    "115 more blocks than any has": (
        swap("blocks.tensor", np.zeros((1 << 20) + 1, np.uint32)),
        "at most 1048576",
    ),
    "29 a column with a missing row": (swap("blocks.digest", np.zeros((2, 16), np.uint8)), "2 rows"),
}


def test_the_table_that_the_attacks_start_from_is_sound() -> None:
    assert VersionTable.from_bytes(forge.table_file(forge.table_columns())).blocks == forge.BLOCKS


@pytest.mark.parametrize("name", ATTACKS)
def test_a_lying_table_is_refused(name: str) -> None:
    attack, message = ATTACKS[name]
    found = forge.table_columns()
    attack(found)
    with pytest.raises(MalformedObject, match=f"^the table: .*({message})"):
        VersionTable.from_bytes(forge.table_file(found), "the table")


def test_30_a_bomb_is_refused_by_the_size_it_states() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(MAX_RAW_BYTES + 1))
    assert len(bomb) < 100_000
    with pytest.raises(MalformedObject, match="at most 268435456"):
        VersionTable.from_bytes(bomb)


def test_31_a_frame_that_does_not_state_its_size_is_refused() -> None:
    raw = columns.pack(forge.table_columns())
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    with pytest.raises(MalformedObject, match="does not state its content size"):
        VersionTable.from_bytes(frame)


def test_32_bytes_after_the_frame_are_refused() -> None:
    with pytest.raises(MalformedObject, match="zstd frame"):
        VersionTable.from_bytes(forge.table_file(forge.table_columns()) + b"x")


def test_33_a_truncated_or_damaged_frame_is_refused() -> None:
    data = forge.table_file(forge.table_columns())
    for damaged in (b"", data[:3], data[:-1], data[: len(data) // 2], b"\0" + data[1:]):
        with pytest.raises(MalformedObject):
            VersionTable.from_bytes(damaged)


def test_34_unknown_and_missing_columns_are_refused() -> None:
    head = container.layout([("blocks.evil", "U8", (0,))], {})
    with pytest.raises(MalformedObject, match="missing or unknown"):
        VersionTable.from_bytes(frames.compress(head))


def header(text: bytes, size: int = 0) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(size)


HEADERS = {
    "35 overlapping tensors": header(
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3
    ),
    "36 a hole between tensors": header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
    "37 bytes that no tensor owns": header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 3),
    "38 data beyond the file": header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 1),
    "39 offsets that do not fit the shape": header(b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}', 2),
    "40 a negative size in a header": header(b'{"a":{"dtype":"U8","shape":[-1,-2],"data_offsets":[0,2]}}', 2),
    "41 the same tensor twice": header(
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "42 a header longer than the file": (1 << 26).to_bytes(8, "little") + b"{}",
    "43 a header of the largest length": ((1 << 64) - 1).to_bytes(8, "little") + b"{}",
    "44 a dtype from outside the table": header(b'{"a":{"dtype":"C64","shape":[],"data_offsets":[0,8]}}', 8),
    "45 sizes that are not numbers": header(b'{"a":{"dtype":"U8","shape":["2"],"data_offsets":[0,2]}}', 2),
    "46 sizes that are not integers": header(b'{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', 2),
    "47 metadata that is no map of strings": header(b'{"__metadata__":{"a":1}}'),
    "48 a header that is no object": header(b"[]"),
    "49 a nest of a million brackets": header(b"[" * (1 << 20)),
    "50 a file too short for a header": b"\0\0\0",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_lying_container_is_refused(name: str) -> None:
    with pytest.raises(MalformedObject, match="the file"):
        container.parse_file(HEADERS[name], "the file")


def test_110_a_header_that_grows_when_it_is_decompressed_is_refused_by_its_length() -> None:
    flood = header(b'{"__metadata__":{"a":"' + b"x" * (1 << 20) + b'"}}')
    bomb = frames.compress(flood)
    assert len(bomb) < 2000
    with pytest.raises(MalformedObject, match="2 to 1048576 are allowed"):
        VersionTable.from_bytes(bomb)
    assert container.parse_file(flood, "the file", max_header=container.CHECKPOINT_HEADER_BYTES).entries == {}


@pytest.mark.parametrize(
    "entry",
    [
        b'"a":{"dtype":"%s","shape":[],"data_offsets":[0,0]}',
        b'"\\ud800%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        b'"a":{"dtype":"U8","shape":["%s"],"data_offsets":[0,0]}',
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":["%s",0]}',
    ],
    ids=["dtype", "name", "size", "offset"],
)
def test_111_a_megabyte_is_not_echoed(entry: bytes) -> None:
    long = header(b"{" + entry % (b"x" * 900_000) + b"}")
    with pytest.raises(MalformedObject, match="the file") as caught:
        container.parse_file(long, "the file")
    assert len(str(caught.value)) < 1000


def test_a_tensor_of_as_many_dimensions_as_are_allowed_is_read() -> None:
    for dtype, width in (("U64", 8), ("BF16", 2)):
        shape = (1,) * 16
        assert (
            container.parse_file(container.layout([("a", dtype, shape)], {}) + bytes(width), "").entries["a"].shape
            == shape
        )
