"""The safetensors container: parsing hostile headers within caps, and laying out new ones.

Does not hold or convert elements: a tensor is a byte range of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import canonical_json, dtypes
from vllm_delta_sync.wire.tensors import TensorSpec

CHECKPOINT_HEADER_BYTES = 100_000_000  # of a checkpoint: the safetensors library's own cap
PREFIX_BYTES = 8
_WIDE = {"U16": 2, "U32": 4, "U64": 8}  # element types of table columns, which no published tensor may have


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file. `start` and `end` are byte offsets from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `data_start` is the byte offset in the file where the data begins."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


def _header_length(prefix: bytes, what: str, max_header: int) -> int:
    if len(prefix) < PREFIX_BYTES:
        raise MalformedObject(f"{what}: {len(prefix)} bytes is too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix[:PREFIX_BYTES])
    if not 2 <= length <= max_header:
        raise MalformedObject(f"{what}: a safetensors header of {length} bytes, 2 to {max_header} are allowed")
    return int(length)


def parse_file(data: memoryview | bytes, what: str, *, max_header: int = canonical_json.MAX_BYTES) -> Header:
    """Check the header of a whole file in memory (or mapped); the tensors must fill the data exactly, without overlap.

    Args:
        what: names the file in errors (MalformedObject).
        max_header: bytes of JSON that are read at most: what the protocol allows, or `CHECKPOINT_HEADER_BYTES` for a
            checkpoint.
    """
    length = _header_length(bytes(data[:PREFIX_BYTES]), what, max_header)
    data_start, size = PREFIX_BYTES + length, len(data)
    if size < data_start:
        raise MalformedObject(f"{what}: truncated inside the safetensors header")
    fields = canonical_json.parse(bytes(data[PREFIX_BYTES:data_start]), what, max_bytes=max_header)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedObject(f"{what}: __metadata__ must map strings to strings")
    entries = {name: _entry(name, value, data_start, what) for name, value in fields.items()}
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise MalformedObject(f"{what}: the data of {name!r} begins at byte {entry.start} where {end} is expected")
        end = entry.end
    if end != size:
        raise MalformedObject(f"{what}: {size} bytes, but its header describes {end}; truncated or padded")
    return Header(entries, metadata, data_start)


def _entry(name: str, value: object, data_start: int, what: str) -> Entry:
    where = f"{what}: tensor {name[:80]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise MalformedObject(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise MalformedObject(f"{where} has a field of the wrong type")
    try:
        wide = _WIDE.get(dtype)
        spec = TensorSpec(name, "U8" if wide else dtype, tuple(shape))  # checks name, rank, sizes and their product
        nbytes = spec.numel * (wide or spec.width)
    except MalformedObject as error:
        raise MalformedObject(f"{what}: {error}") from None
    if any(type(offset) is not int or offset < 0 for offset in offsets) or offsets[1] - offsets[0] != nbytes:
        raise MalformedObject(f"{where}: data_offsets {str(offsets)[:80]} do not span its {nbytes} bytes")
    return Entry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The bytes before the data of a file that holds these (name, dtype, shape) in this order; a multiple of 8 long."""
    fields: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        size = _WIDE.get(dtype) or dtypes.by_name(dtype).width
        for n in shape:
            size *= n
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = canonical_json.dump(fields)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
