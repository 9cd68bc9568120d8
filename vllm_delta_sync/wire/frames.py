"""Zstandard frames that state their size: compressing, and decompressing hostile ones within a cap.

Does not know what the bytes mean.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import zstandard

from vllm_delta_sync.errors import MalformedObject

Buffer: TypeAlias = bytes | bytearray | memoryview

LEVEL = 3  # gap and step streams are near their entropy: levels 1 to 9 come within 3 % of each other

_local = threading.local()  # a zstd context must not be shared by threads


def compress(data: Buffer) -> bytes:
    """One zstd frame with its content size."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    return compressor.compress(data)


def content_size(frame: Buffer, what: str) -> int:
    """The raw bytes a frame says it holds; raises MalformedObject when it is no frame or does not say."""
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise MalformedObject(f"{what}: not a zstd frame ({error})") from None
    if size < 0:
        raise MalformedObject(f"{what}: the zstd frame does not state its content size")
    return size


def decompress(frame: Buffer, raw: int, what: str) -> bytes:
    """The `raw` bytes of one frame; raises MalformedObject when it is damaged, of another size, or followed by bytes.

    The stated content size is compared before anything is allocated, so a frame cannot expand beyond `raw`.
    """
    stated = content_size(frame, what)
    if stated != raw or raw == 0:
        raise MalformedObject(f"{what}: the zstd frame holds {stated} raw bytes where {raw} are stated")
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        data = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedObject(f"{what}: damaged zstd frame ({error})") from None
    if len(data) != raw:
        raise MalformedObject(f"{what}: the zstd frame held {len(data)} raw bytes where {raw} are stated")
    return data
