"""The shards of a version or a fold in the store: writing them with their table, and reading both back verified.

Does not know manifests or catalogs, and decodes no block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import MalformedObject, PublishError
from vllm_delta_sync.log import fetch
from vllm_delta_sync.log.packing import Packed
from vllm_delta_sync.store import Batch, Store
from vllm_delta_sync.wire import consistency, shard
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import MAX_SHARDS, MAX_TABLE_BYTES, Found, ShardRef, TableRef, Totals
from vllm_delta_sync.wire.payload import Parts
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.table import Block, VersionTable


@dataclass(frozen=True, slots=True)
class Written:
    """What a manifest or a catalog states of a payload that is in the store."""

    table: TableRef
    shards: tuple[ShardRef, ...]
    bytes: int  # of all shards
    changed: int  # elements, as the blocks count them

    def totals(self, tensors: int, elements: int) -> Totals:
        """With the size of the whole model."""
        return Totals(tensors=tensors, elements=elements, changed=self.changed, bytes=self.bytes)


def require_fits(packed: Packed, what: str) -> None:
    """Raise PublishError when there are more shards than a payload may have."""
    if len(packed.shards) > MAX_SHARDS:
        raise PublishError(f"{what} takes {len(packed.shards)} shards, at most {MAX_SHARDS} fit")


def write(batch: Batch, ends: Ends, packed: Packed, keys: Sequence[str]) -> Written:
    """Put the shards of a payload under `keys`, one for each, which nothing has; raises what the store raises."""
    table = packed.table.to_bytes()
    refs: list[ShardRef] = []
    for number, (key, payloads) in enumerate(zip(keys, packed.shards, strict=True)):
        data, data_start = shard.pack_shard(ends, payloads, table if number == 0 else None)
        info = batch.put(key, data)
        sha256 = hashlib.sha256(data).hexdigest()
        refs.append(ShardRef(key=key, size=len(data), sha256=sha256, content=info.content, data_start=data_start))
    start = refs[0].data_start - len(table)
    return Written(
        table=TableRef(start=start, size=len(table), sha256=hashlib.sha256(table).hexdigest()),
        shards=tuple(refs),
        bytes=sum(ref.size for ref in refs),
        changed=sum(block.changed for block in packed.table.blocks),
    )


def read_table(store: Store, parts: Parts) -> VersionTable:
    """The table of a payload, fetched alone, verified by its own digest and consistent with what states it."""
    ref, at = parts.shards[0], parts.table
    what = f"{store.uri}/{ref.key}, table"
    table = VersionTable.from_bytes(fetch.verified_range(store, ref, at.start, at.size, at.sha256), what)
    consistency.check(parts, table, what)
    return table


def read_states(where: str, ref: Found, state_root: str, fetched: Callable[[], Buffer]) -> VersionTable:
    """An anchor's table of all tensors' states, consistent with the state root of its version.

    Args:
        where: URI of the run, for messages.
        fetched: fetches and verifies it.
    """
    what = f"{where}/{ref.key}"
    if ref.size > MAX_TABLE_BYTES:
        raise MalformedObject(f"{what}: a table of {ref.size} bytes, at most {MAX_TABLE_BYTES} are allowed")
    table = VersionTable.from_bytes(bytes(fetched()), what)
    consistency.check_states(table, state_root, what)
    return table


def read_blocks(store: Store, run: str, parts: Parts, rows: Sequence[Block]) -> Iterator[tuple[Block, Buffer]]:
    """Each of these rows of the payload's table with its stored bytes, still encoded; one whole shard at a time.

    Shards that no row is in are not fetched. Raises DigestMismatch, MalformedObject or NotFound by the shard's key.
    """
    by_shard: dict[int, list[Block]] = {}
    for row in rows:
        by_shard.setdefault(row.shard, []).append(row)
    for index, blocks in sorted(by_shard.items()):
        blob = read_shard(store, run, parts, index)
        for block in blocks:
            yield block, blob[block.offset : block.offset + block.stored]


def read_shard(store: Store, run: str, parts: Parts, index: int) -> memoryview:
    """The blob of blocks of shard `index`, once the whole shard is verified."""
    ref = parts.shards[index]
    what = f"{store.uri}/{ref.key}"
    ends = Ends(run, parts.source, parts.to)
    opened = shard.open_shard(fetch.verified(store, ref), ends, what, first=index == 0)
    if opened.data_start != ref.data_start:
        raise MalformedObject(f"{what}: its blocks begin at {opened.data_start}, {ref.data_start} is stated")
    if index == 0 and (opened.table_start, len(opened.table)) != (parts.table.start, parts.table.size):
        raise MalformedObject(f"{what}: its table is at {opened.table_start}, {parts.table.start} is stated")
    return opened.blocks
