"""A shard: a safetensors file whose one tensor is the concatenated bytes of blocks.

Does not know block boundaries: those are in the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import container
from vllm_delta_sync.wire.frames import Buffer

FORMAT = "vllm-delta-sync/1"
TARGET_BYTES = 256 << 20  # what a writer fills a shard to
MAX_BYTES = 1 << 30  # what a reader accepts


def pack_shard(run: str, version: int, payloads: Sequence[Buffer]) -> tuple[bytes, int]:
    """The file that holds the payloads one after the other, and the byte offset in it where they begin.

    The payloads are copied once.
    """
    size = sum(len(payload) for payload in payloads)
    metadata = {"format": FORMAT, "run": run, "version": str(version)}
    head = container.layout([("blocks", "U8", (size,))], metadata)
    return b"".join((head, *payloads)), len(head)


def open_shard(data: bytes, run: str, version: int, what: str) -> memoryview:
    """The bytes of the blocks in a whole shard; raises MalformedObject when it is none of this run and version."""
    header = container.parse_file(data, what)
    expected = {"format": FORMAT, "run": run, "version": str(version)}
    if header.metadata != expected:
        stated = str(header.metadata)[:200]
        raise MalformedObject(f"{what}: its metadata {stated} is not that of run {run}, version {version}")
    blocks = header.entries.get("blocks")
    if blocks is None or len(header.entries) != 1 or blocks.dtype != "U8" or len(blocks.shape) != 1:
        raise MalformedObject(f"{what}: a shard holds exactly one tensor, blocks, of U8 [n]")
    return memoryview(data)[blocks.start : blocks.end]
