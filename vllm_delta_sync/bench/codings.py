"""Each codec of the log as a way to encode a changed block, and what a publisher makes of an update with it.

Does not measure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeAlias

from vllm_delta_sync.bench.step import Model, Part, parts
from vllm_delta_sync.log import LogWriter, TensorUpdate
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.native import Changes
from vllm_delta_sync.store import Store
from vllm_delta_sync.wire import codec_rules, dtypes, state_hash
from vllm_delta_sync.wire.codecs import EncodedBlock, dense_block, encode_block, gap_abs_block, gap_of
from vllm_delta_sync.wire.manifest import BaseRef
from vllm_delta_sync.wire.shard import TARGET_BYTES, Ends, pack_shard

Coding: TypeAlias = Callable[[Part, Changes], EncodedBlock]  # of a block in which something changed


def adaptive(part: Part, changes: Changes) -> EncodedBlock:
    """What a publisher writes: the smallest."""
    return encode_block(part.spec, changes, part.start, part.count, part.new)


def _gap(part: Part, changes: Changes) -> EncodedBlock:
    # Only half floats have steps; other tensors of a checkpoint go with absolute values.
    return gap_of(changes) if dtypes.by_name(part.spec.dtype).half else _gap_abs(part, changes)


def _gap_abs(part: Part, changes: Changes) -> EncodedBlock:
    return gap_abs_block(changes.positions, changes.new)


def _dense(part: Part, changes: Changes) -> EncodedBlock:
    return dense_block(part.new, changes.positions.size)


CODINGS: Mapping[str, Coding] = {
    codec_rules.NAMES[codec_rules.GAP]: _gap,
    codec_rules.NAMES[codec_rules.GAP_ABS]: _gap_abs,
    codec_rules.NAMES[codec_rules.DENSE]: _dense,
    "adaptive": adaptive,
}
"""Every codec of the registry by its name there, and the publisher's choice among them."""


def encode(part: Part, coding: Coding) -> EncodedBlock | None:
    """Find the changes of a block and encode them; None where there are none."""
    changes = part.diff()
    return coding(part, changes) if changes.positions.size else None


def updates(before: Model, after: Model, coding: Coding = adaptive) -> list[TensorUpdate]:
    """Every tensor that changed, its blocks encoded."""
    blocks: dict[str, list[tuple[int, int, EncodedBlock]]] = {}
    for part in parts(before, after):
        encoded = encode(part, coding)
        if encoded is not None:
            blocks.setdefault(part.spec.name, []).append((part.start, part.count, encoded))
    return [TensorUpdate(after[name][0], state_hash.of_tensor(*after[name]), found) for name, found in blocks.items()]


def payload_bytes(ends: Ends, found: list[TensorUpdate]) -> int:
    """Bytes of all shards that hold these blocks, with their table: all that is uploaded but the manifest."""
    packed = pack(found, TARGET_BYTES)
    tables = [packed.table.to_bytes(), *[None] * (len(packed.shards) - 1)]
    shards = zip(packed.shards, tables, strict=True)
    return sum(len(pack_shard(ends, payloads, table)[0]) for payloads, table in shards)


def write_log(where: str | Store, base: str | os.PathLike[str], models: Iterable[Model]) -> LogWriter:
    """A log without folds whose version n is the n-th model; its base is named, not written."""
    states = iter(models)
    first = next(states)
    lanes = {spec: state_hash.of_tensor(spec, bits) for spec, bits in first.values()}
    writer = LogWriter.create(where, lanes, base=BaseRef(model=os.fspath(base)))
    for old, new in pairwise([first, *states]):
        found = updates(old, new)
        lanes |= {update.spec: update.lanes for update in found}
        writer.commit(found, state_root=state_hash.state_root(lanes))
    return writer
