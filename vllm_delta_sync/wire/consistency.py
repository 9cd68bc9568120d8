"""What a payload, as its manifest or catalog states it, and its table must say alike.

Does not fetch either.
"""

from __future__ import annotations

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.codec_rules import CTX, DENSE
from vllm_delta_sync.wire.payload import Parts
from vllm_delta_sync.wire.table import VersionTable


def check(parts: Parts, table: VersionTable, what: str) -> None:
    """Raise MalformedObject, naming `what`, unless the table can be that of the payload."""
    changed = sum(block.changed for block in table.blocks)
    if changed != parts.totals.changed:
        raise MalformedObject(f"{what}: {changed} elements change, {parts} is said to have {parts.totals.changed}")
    if parts.is_base:
        _check_base(parts, table, what)
    listed = {block.tensor for block in table.blocks}
    if not parts.is_base and len(listed) != len(table.tensors):
        idle = next(spec.name for index, spec in enumerate(table.tensors) if index not in listed)
        raise MalformedObject(f"{what}: tensor {idle!r} is listed but has no block")
    for block in table.blocks:
        if block.shard >= len(parts.shards):
            raise MalformedObject(f"{what}: block {block} is in shard {block.shard} of {len(parts.shards)}")
        shard = parts.shards[block.shard]
        if shard.data_start + block.offset + block.stored > shard.size:
            raise MalformedObject(f"{what}: block {block} reaches beyond the {shard.size} bytes of {shard.key}")
        if parts.is_fold and block.codec == DENSE and block.changed != block.count:
            raise MalformedObject(f"{what}: block {block} of a fold is dense, but does not count all it lists")
        if parts.is_fold and block.codec == CTX:
            raise MalformedObject(f"{what}: block {block} of a fold has codec ctx, which is for deltas only")


def check_states(table: VersionTable, root: str, what: str) -> None:
    """Raise MalformedObject, naming `what`, unless the table's states come to this state root, and it has no blocks."""
    if table.blocks:
        raise MalformedObject(f"{what}: a table of the whole model's states has no blocks")
    found = state_hash.state_root(dict(zip(table.tensors, table.hashes, strict=True)))
    if found != root:
        raise MalformedObject(f"{what}: its hashes come to state root {found}, not {root} as stated")


def _check_base(parts: Parts, table: VersionTable, what: str) -> None:
    elements = sum(spec.numel for spec in table.tensors)
    if (len(table.tensors), elements) != (parts.totals.tensors, parts.totals.elements):
        raise MalformedObject(
            f"{what}: {len(table.tensors)} tensors of {elements} elements, the manifest says "
            f"{parts.totals.tensors} of {parts.totals.elements}"
        )
    check_states(table, parts.after, what)
