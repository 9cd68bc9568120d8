"""Tools of a forger who may write to the bucket: damage objects, and make the chain of digests fit again.

Holds no assertions.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import tiny_log

from vllm_delta_sync.wire import columns, frames, shard
from vllm_delta_sync.wire.columns import Columns
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.table import Block, VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def replace_tip(tiny: tiny_log.TinyLog, **fields: Any) -> None:
    """Write the tip's manifest again with other fields (unchecked), and point LATEST to it."""
    pointer = tiny.log.latest()
    manifest = json.loads(tiny.object(pointer.manifest.key).read_bytes()) | fields
    replace_tip_bytes(tiny, dump(manifest))


def replace_tip_bytes(tiny: tiny_log.TinyLog, data: bytes) -> None:
    """Write these bytes as the tip's manifest, and point LATEST to them."""
    path = tiny.run_dir / "LATEST"
    pointer = json.loads(path.read_bytes())
    manifest = replace_object(tiny, pointer["manifest"], data)
    path.write_bytes(dump(pointer | {"manifest": manifest}))


def replace_object(tiny: tiny_log.TinyLog, ref: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Write an object of the tip again; returns the reference that fits it."""
    tiny.object(ref["key"]).write_bytes(data)
    return ref | {"size": len(data), "sha256": sha256(data)}


def replace_tip_table(tiny: tiny_log.TinyLog, data: bytes) -> None:
    """Give the tip another table, with shard, manifest and LATEST to fit."""
    tip: Manifest = tiny.log.tip()
    blob = tiny.object(tip.shards[0].key).read_bytes()[tip.shards[0].data_start :]
    file, start = shard.pack_shard(Ends(tip.run, tip.version - 1, tip.version), [blob], data)
    table = {"start": start - len(data), "size": len(data), "sha256": sha256(data)}
    replace_tip_shard(tiny, file, table=table, data_start=start)


def replace_tip_shard(
    tiny: tiny_log.TinyLog, data: bytes, *, table: dict[str, Any] | None = None, data_start: int | None = None
) -> None:
    """Give the tip another first shard, with manifest and LATEST to fit; the table stays where it was stated."""
    tip: Manifest = tiny.log.tip()
    ref = replace_object(tiny, tip.shards[0].model_dump(mode="json"), data)
    if data_start is not None:
        ref["data_start"] = data_start
    totals = tip.totals.model_dump() | {"bytes": len(data)}
    replace_tip(tiny, shards=[ref], totals=totals, table=table or tip.table.model_dump(mode="json"))


SPECS = (TensorSpec("a", "BF16", (1000,)), TensorSpec("b", "F32", (4, 5)))
BLOCKS = (
    Block(0, SPECS[0], 0, 500, 1, 50, 0, 0, (40, 30), (50, 50), bytes(16)),
    Block(0, SPECS[0], 500, 500, 0, 7, 0, 70, (0, 1000), (0, 1000), bytes(16)),
    Block(1, SPECS[1], 0, 20, 2, 3, 1, 0, (12, 20), (3, 12), bytes(16)),
)


def table_columns() -> Columns:
    """Writable columns of a sound table of two tensors and three blocks (gap, dense, gap-abs)."""
    table = VersionTable(SPECS, np.zeros((2, 4), np.uint32), BLOCKS)
    raw = frames.decompress(data := table.to_bytes(), frames.content_size(data, "table"), "table")
    return {name: column.copy() for name, column in columns.unpack(raw, "table").items()}


def table_file(found: Columns) -> bytes:
    """The compressed table of these columns, unchecked."""
    return frames.compress(columns.pack(found))
