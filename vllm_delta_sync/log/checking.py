"""Checking one object of a log at a time: a version or a fold, an anchor, what the catalog says of them.

Does not walk the log, and does not need the weights: steps of blocks are decoded, not applied, and tiles of ctx blocks
neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from vllm_delta_sync.errors import DeltaSyncError, LogError, NotFound
from vllm_delta_sync.log import anchors
from vllm_delta_sync.log.payload import read_shard
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.catalog import Anchor, Fold
from vllm_delta_sync.wire.codecs import check_block
from vllm_delta_sync.wire.manifest import AnchorFile, Manifest, ObjectRef
from vllm_delta_sync.wire.payload import parts_of
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

State: TypeAlias = Mapping[TensorSpec, state_hash.Lanes]  # of every tensor of the model


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: at which version, of which kind (`DeltaSyncError.cause`), and the message."""

    version: int
    cause: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """A version or a fold: the state it leads to, None where that cannot be told, and what is wrong with it."""

    state: State | None
    blocks: int
    faults: tuple[Fault, ...]


def check_payload(log: DeltaLog, payload: Manifest | Fold, before: State | None) -> Checked:
    """Check every digest, block and state root of a version or a fold, where the state `before` it is known.

    Raises only when the store fails.
    """
    parts = parts_of(payload)
    try:
        table = log.table(payload)
        if before is not None:
            what = f"{log.store.uri}/{parts.shards[0].key}"
            table.require_known({spec.name: spec for spec in before}, what)
    except (LogError, NotFound) as error:
        return Checked(None, 0, (_fault(parts.to, error),))
    faults = _block_faults(log, payload, table)
    if parts.is_fold and before is not None and state_hash.state_root(before) != parts.before:
        message = f"{parts} begins at state root {parts.before}, version {parts.source} has another one"
        faults.append(Fault(parts.to, "state_hash", message))
        before = None
    if before is None and not parts.is_base:
        return Checked(None, len(table.blocks), tuple(faults))
    state = {**(before or {}), **dict(zip(table.tensors, table.hashes, strict=True))}
    root = state_hash.state_root(state)
    if root != parts.after:
        message = f"{parts}: the tables come to state root {root}, {parts.after} is stated"
        return Checked(state, len(table.blocks), (*faults, Fault(parts.to, "state_hash", message)))
    return Checked(state, len(table.blocks), tuple(faults))


def _block_faults(log: DeltaLog, payload: Manifest | Fold, table: VersionTable) -> list[Fault]:
    parts, rows, faults = parts_of(payload), table.by_shard(), list[Fault]()
    for index in range(len(parts.shards)):  # also one that no block is in
        try:
            blob = read_shard(log.store, log.run, parts, index)
        except (LogError, NotFound) as error:
            faults.append(_fault(parts.to, error))
            continue
        for block in rows.get(index, []):
            try:
                check_block(block, blob[block.offset : block.offset + block.stored])
            except LogError as error:
                faults.append(_fault(parts.to, error))
    return faults


def check_files(log: DeltaLog, version: int, files: Iterable[AnchorFile]) -> list[Fault]:
    """Check every digest of an anchor's checkpoint."""
    faults = []
    for ref in files:
        try:
            for _ in anchors.pieces(log.store, ref):
                pass
        except (LogError, NotFound) as error:
            faults.append(_fault(version, error))
    return faults


def check_anchor(log: DeltaLog, anchor: Anchor) -> Checked:
    """Check an anchor's files and the table of its states; the state is that of its version."""
    faults = check_files(log, anchor.version, anchor.checkpoint.files)
    try:
        table = log.states(anchor.table, anchor.state_root)
    except (LogError, NotFound) as error:
        return Checked(None, 0, (*faults, _fault(anchor.version, error)))
    return Checked(dict(zip(table.tensors, table.hashes, strict=True)), 0, tuple(faults))


def check_target(log: DeltaLog, entry: Fold | Anchor, on_branch: ObjectRef | None) -> list[Fault]:
    """Check that a fold or an anchor ends at a version of this branch, in that version's state.

    Args:
        on_branch: the manifest of that version as the chain of deltas leads to it; None where it does not.
    """
    to, root, name = (
        (entry.to, entry.after, f"the fold from version {entry.source} to {entry.to}")
        if isinstance(entry, Fold)
        else (entry.version, entry.state_root, f"the anchor of version {entry.version}")
    )
    if on_branch is not None and on_branch.sha256 != entry.manifest.sha256:
        return [Fault(to, "version_gap", f"{name} ends at {entry.manifest.key}, which is not of this branch")]
    try:
        manifest = log.manifest(entry.manifest)
    except (LogError, NotFound) as error:
        return [_fault(to, error)]
    if (manifest.version, manifest.state_root) != (to, root):
        message = f"{name} ends at state root {root}; {entry.manifest.key} is version {manifest.version} with another"
        return [Fault(to, "state_hash", message)]
    return []


def _fault(version: int, error: DeltaSyncError) -> Fault:
    return Fault(version, error.cause, str(error))
