"""What a manifest and its table must say alike.

Does not fetch either.
"""

from __future__ import annotations

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.table import VersionTable


def check(manifest: Manifest, table: VersionTable) -> None:
    """Raise MalformedObject unless the table can be that of the manifest."""
    key = manifest.table.key
    changed = sum(block.changed for block in table.blocks)
    if changed != manifest.totals.changed:
        raise MalformedObject(f"{key}: {changed} elements change, the manifest says {manifest.totals.changed}")
    if manifest.kind == "base":
        _check_base(manifest, table)
    listed = {block.tensor for block in table.blocks}
    if manifest.kind == "delta" and len(listed) != len(table.tensors):
        idle = next(spec.name for index, spec in enumerate(table.tensors) if index not in listed)
        raise MalformedObject(f"{key}: tensor {idle!r} is listed but has no block")
    for block in table.blocks:
        if block.shard >= len(manifest.shards):
            raise MalformedObject(f"{key}: block {block} is in shard {block.shard} of {len(manifest.shards)}")
        shard = manifest.shards[block.shard]
        if shard.data_start + block.offset + block.stored > shard.size:
            raise MalformedObject(f"{key}: block {block} reaches beyond the {shard.size} bytes of {shard.key}")


def _check_base(manifest: Manifest, table: VersionTable) -> None:
    key = manifest.table.key
    elements = sum(spec.numel for spec in table.tensors)
    if (len(table.tensors), elements) != (manifest.totals.tensors, manifest.totals.elements):
        raise MalformedObject(
            f"{key}: {len(table.tensors)} tensors of {elements} elements, the manifest says "
            f"{manifest.totals.tensors} of {manifest.totals.elements}"
        )
    if table.blocks:
        raise MalformedObject(f"{key}: the table of a base has no blocks")
    root = state_hash.state_root(dict(zip(table.tensors, table.hashes, strict=True)))
    if root != manifest.state_root:
        raise MalformedObject(f"{key}: its hashes come to state root {root}, the manifest says {manifest.state_root}")
