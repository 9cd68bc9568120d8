"""A shard: a safetensors file of the concatenated bytes of blocks, and in a payload's first shard its compressed table.

Does not know block boundaries: those are in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import container
from vllm_delta_sync.wire.frames import Buffer

FORMAT = "vllm-delta-sync/1"
TARGET_BYTES = 256 << 20  # what a writer fills a shard to, its table not counted
MAX_BYTES = 1 << 30  # what a reader accepts


@dataclass(frozen=True, slots=True)
class Ends:
    """What a payload leads from and to: the versions n−1 and n for a delta, 0 and 0 for a base."""

    run: str
    source: int
    to: int

    def metadata(self) -> dict[str, str]:
        """The metadata of each of its shards."""
        return {"format": FORMAT, "run": self.run, "source": str(self.source), "version": str(self.to)}


@dataclass(frozen=True, slots=True)
class Opened:
    """A whole shard. `table` is empty except in a first one; the starts are byte offsets from the file's beginning."""

    table: memoryview
    table_start: int
    blocks: memoryview
    data_start: int


def pack_shard(ends: Ends, payloads: Sequence[Buffer], table: bytes | None = None) -> tuple[bytes, int]:
    """The file that holds the table, if any, and the payloads one after the other; and where the payloads begin in it.

    The table ends there. Everything is copied once.
    """
    size = sum(len(payload) for payload in payloads)
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("blocks", "U8", (size,))]
    if table is not None:
        tensors.insert(0, ("table", "U8", (len(table),)))
    head = container.layout(tensors, ends.metadata())
    return b"".join((head, table or b"", *payloads)), len(head) + len(table or b"")


def open_shard(data: bytes, ends: Ends, what: str, *, first: bool) -> Opened:
    """The parts of a whole shard; raises MalformedObject when it is none of this run and these versions.

    Args:
        first: whether it is the payload's first shard, which holds the table.
    """
    header = container.parse_file(data, what)
    if header.metadata != ends.metadata():
        stated = str(header.metadata)[:200]
        raise MalformedObject(
            f"{what}: its metadata {stated} is not that of run {ends.run}, versions {ends.source} to {ends.to}"
        )
    names = ["table", "blocks"] if first else ["blocks"]
    entries = header.entries
    in_order = sorted(entries, key=lambda name: (entries[name].start, entries[name].end))
    if in_order != names or any(entry.dtype != "U8" or len(entry.shape) != 1 for entry in entries.values()):
        raise MalformedObject(f"{what}: such a shard holds exactly {' and '.join(names)}, of U8 [n]")
    view, blocks = memoryview(data), entries["blocks"]
    start = entries["table"].start if first else blocks.start
    return Opened(view[start : blocks.start], start, view[blocks.start : blocks.end], blocks.start)
