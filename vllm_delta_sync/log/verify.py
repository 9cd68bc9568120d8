"""Checking a whole log without a base: every digest, every block's streams, every state root.

Does not stop at the first fault, and does not need the weights: steps of blocks are decoded, not applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import DeltaSyncError, LogError, NotFound
from vllm_delta_sync.log import anchors
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: in which version, of which kind (`DeltaSyncError.cause`), and the message."""

    version: int
    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a walk of the log found. `bytes` counts shards and tables of the versions walked."""

    versions: int
    blocks: int
    bytes: int
    faults: tuple[Fault, ...]


def verify(log: DeltaLog, *, progress: Progress = silent) -> Verdict:
    """Walk the log from the base to the tip. Raises only when the chain itself cannot be walked, or the store fails."""
    chain = log.manifests()
    faults: list[Fault] = []
    lanes: dict[TensorSpec, state_hash.Lanes] | None = None
    blocks = 0
    for manifest in chain:
        progress("verifying versions", manifest.version, len(chain))
        try:
            table = log.table(manifest)
            if lanes is None and manifest.kind == "base":
                lanes = {}
            elif lanes is not None:
                table.require_known({spec.name: spec for spec in lanes}, f"{log.store.uri}/{manifest.table.key}")
        except (LogError, NotFound) as error:
            faults.append(_fault(manifest, error))
            lanes = None  # without this table, no later state root can be computed
            continue
        blocks += len(table.blocks)
        rows = table.by_shard()
        for index in range(len(manifest.shards)):  # also one that no block is in
            faults += _shard_faults(log, manifest, index, rows.get(index, []))
        if lanes is not None:
            lanes.update(zip(table.tensors, table.hashes, strict=True))
            root = state_hash.state_root(lanes)
            if root != manifest.state_root:
                message = f"the tables come to state root {root}, the manifest says {manifest.state_root}"
                faults.append(Fault(manifest.version, "state_hash", message))
        if manifest.anchor is not None:
            faults += _anchor_faults(log, manifest)
    progress("verifying versions", len(chain), len(chain))
    return Verdict(len(chain), blocks, sum(manifest.totals.bytes for manifest in chain), tuple(faults))


def _shard_faults(log: DeltaLog, manifest: Manifest, index: int, rows: Sequence[Block]) -> list[Fault]:
    faults = []
    try:
        for block, payload in log.shard_blocks(manifest, index, rows):
            try:
                decode_block(block, payload)
            except LogError as error:
                faults.append(_fault(manifest, error))
    except (LogError, NotFound) as error:
        faults.append(_fault(manifest, error))
    return faults


def _anchor_faults(log: DeltaLog, manifest: Manifest) -> list[Fault]:
    assert manifest.anchor is not None, "only called for versions with an anchor"
    faults = []
    for ref in manifest.anchor.files:
        try:
            for _ in anchors.pieces(log.store, ref):
                pass
        except (LogError, NotFound) as error:
            faults.append(_fault(manifest, error))
    return faults


def _fault(manifest: Manifest, error: DeltaSyncError) -> Fault:
    return Fault(manifest.version, error.cause, str(error))
