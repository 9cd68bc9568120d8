"""Writing versions: shards, table, manifest, and only then LATEST.

Does not diff, encode or retry. A store has no compare-and-swap here: a rival is noticed, not locked out.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from vllm_delta_sync.errors import (
    DeltaSyncError,
    MalformedObject,
    NotFound,
    PublishError,
    RivalWriter,
    StoreError,
    UnsettledWrite,
    VersionGap,
)
from vllm_delta_sync.log import anchors, names
from vllm_delta_sync.log.packing import Packed, TensorUpdate, pack
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.store import Store, child, open_store
from vllm_delta_sync.wire import manifest as wire
from vllm_delta_sync.wire import shard, state_hash
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.state_hash import Lanes
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec


class LogWriter:
    """The one writer of a run. Not for use from several threads at once.

    Args:
        pointer: what LATEST says.
        tip: the manifest it points to.
        shard_bytes: what a shard is filled to.
    """

    def __init__(
        self, log: DeltaLog, pointer: wire.LatestPointer, tip: wire.Manifest, *, shard_bytes: int = shard.TARGET_BYTES
    ) -> None:
        self.log = log
        self.tip = tip
        self._pointer = pointer
        self._shard_bytes = shard_bytes

    @property
    def pointer(self) -> wire.LatestPointer:
        """What this writer last read from or wrote to LATEST."""
        return self._pointer

    @classmethod
    def create(
        cls,
        where: str | Store,
        base_table: Mapping[TensorSpec, Lanes],
        *,
        base: wire.BaseRef | None,
        anchor: Sequence[Path] = (),
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> LogWriter:
        """Begin a new run at version 0 and make it the current one.

        Args:
            base_table: every tensor of the model with its lanes u32[4] at version 0.
            base: where others find the checkpoint of version 0, or None when only the anchor has it.
            anchor: files of that checkpoint to put into the run.
        """
        root = open_store(where) if isinstance(where, str) else where
        run, attempt = uuid.uuid4().hex, uuid.uuid4().hex
        log = DeltaLog(child(root, run), run)
        specs = tuple(sorted(base_table, key=lambda spec: spec.name.encode()))
        hashes = np.array([base_table[spec] for spec in specs], np.uint32).reshape(-1, 4)
        elements = sum(spec.numel for spec in specs)
        attempted = [*anchors.keys(0, anchor), names.table(0, attempt), names.manifest(0, attempt)]
        with _discarding(log.store, attempted):
            files = anchors.write(log.store, 0, anchor) if anchor else None
            table = _put_table(log.store, names.table(0, attempt), VersionTable(specs, hashes, ()))
            manifest = wire.Manifest(
                run=run,
                version=0,
                kind="base",
                parent=None,
                created=time.time(),
                step=step,
                metadata=dict(metadata or {}),
                base=base,
                anchor=files,
                totals=wire.Totals(tensors=len(specs), elements=elements, changed=0, bytes=table.size),
                shards=(),
                table=table,
                state_root=state_hash.state_root(base_table),
            )
            pointer = _pointer(_put_manifest(log.store, manifest, attempt), manifest, sequence=0)
        log.store.put(names.LATEST, pointer.to_bytes(), create=True)
        root.put(names.RUN, run.encode())
        return cls(log, pointer, manifest)

    @classmethod
    def attach(cls, log: DeltaLog) -> LogWriter:
        """Continue a run from its tip."""
        pointer = log.latest()
        tip = log.manifest(pointer.ref)
        if tip.version != pointer.version:
            raise VersionGap(f"{log.store.uri}: LATEST says version {pointer.version}, its manifest {tip.version}")
        return cls(log, pointer, tip)

    def commit(
        self,
        updates: Sequence[TensorUpdate],
        *,
        state_root: str,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> wire.Manifest:
        """Write the version after the tip and make it the tip; without updates it is one in which nothing changed.

        Raises RivalWriter when LATEST is not what this writer last read or wrote, StoreError when the store fails, and
        UnsettledWrite when it fails so that only a writer that is attached anew can go on. The tip of this writer is
        then as before.
        """
        version, attempt = self.tip.version + 1, uuid.uuid4().hex
        packed = pack(updates, self._shard_bytes)
        total = len(packed.shards)
        if total > wire.MAX_SHARDS:
            raise PublishError(f"version {version} takes {total} shards, at most {wire.MAX_SHARDS} fit")
        shards = [names.shard(version, attempt, number, total) for number in range(1, total + 1)]
        table, manifest_key = names.table(version, attempt), names.manifest(version, attempt)
        with _discarding(self.log.store, [*shards, table, manifest_key]):
            manifest = self._write(packed, shards, table, state_root, step, metadata)
            ref = _put_manifest(self.log.store, manifest, attempt)
            self._require_latest()
        self._advance(_pointer(ref, manifest, sequence=self._pointer.sequence + 1), manifest)
        return manifest

    def _write(
        self,
        packed: Packed,
        shard_keys: Sequence[str],
        table_key: str,
        state_root: str,
        step: int | None,
        metadata: Mapping[str, str] | None,
    ) -> wire.Manifest:
        """Write the shards and the table of the version after the tip; returns the manifest to be written."""
        version, store = self.tip.version + 1, self.log.store
        shards = tuple(
            _put_shard(store, key, self.log.run, version, payloads)
            for key, payloads in zip(shard_keys, packed.shards, strict=True)
        )
        table = _put_table(store, table_key, packed.table)
        return wire.Manifest(
            run=self.log.run,
            version=version,
            kind="delta",
            parent=self._pointer.ref,
            created=time.time(),
            step=step,
            metadata=dict(metadata or {}),
            base=None,
            anchor=None,
            totals=wire.Totals(
                tensors=self.tip.totals.tensors,
                elements=self.tip.totals.elements,
                changed=sum(block.changed for block in packed.table.blocks),
                bytes=table.size + sum(ref.size for ref in shards),
            ),
            shards=shards,
            table=table,
            state_root=state_root,
        )

    def _require_latest(self) -> None:
        found = self._latest()
        if found != self._pointer:
            named = f"version {found.version} ({found.manifest})" if found else "nothing that can be read"
            raise RivalWriter(
                f"{self.log.store.uri}/{names.LATEST} names {named}, not version {self._pointer.version} as this "
                "writer left it: another publisher writes to this run, or a write that was reported as failed arrived "
                "after all; stop the other one, or resume from the log"
            )

    def _advance(self, pointer: wire.LatestPointer, manifest: wire.Manifest) -> None:
        try:
            self.log.store.put(names.LATEST, pointer.to_bytes())
        except StoreError as error:
            # A write can arrive although its answer was lost. Only what LATEST says now tells.
            if not self._arrived(pointer, error):
                raise
        self._pointer, self.tip = pointer, manifest

    def _arrived(self, pointer: wire.LatestPointer, failure: StoreError) -> bool:
        """Whether LATEST is `pointer` although its write failed, made durable then; UnsettledWrite if neither."""
        try:
            if self._latest() != pointer:
                return False
            # What a failed sync left can be read, from a cache, and still be gone after a crash: only a write that
            # succeeds counts.
            self.log.store.put(names.LATEST, pointer.to_bytes())
            return True
        except StoreError as error:
            raise UnsettledWrite(
                f"{self.log.store.uri}/{names.LATEST}: writing version {pointer.version} failed ({failure}), and so "
                f"did finding out what became of it ({error}); open a publisher with resume=True once the store "
                "answers again: it goes on from whichever version is there, and its publish() brings the difference"
            ) from error

    def _latest(self) -> wire.LatestPointer | None:
        try:
            return self.log.latest()
        except (NotFound, MalformedObject, VersionGap):
            return None


@contextmanager
def _discarding(store: Store, keys: Iterable[str]) -> Iterator[None]:
    """Remove the objects of an attempt that fails before anything can refer to them, as far as the store lets us."""
    try:
        yield
    except BaseException:
        with suppress(DeltaSyncError):
            store.delete(keys)
        raise


def _pointer(ref: wire.ObjectRef, manifest: wire.Manifest, *, sequence: int) -> wire.LatestPointer:
    return wire.LatestPointer(
        manifest=ref.key, run=manifest.run, sequence=sequence, sha256=ref.sha256, version=manifest.version
    )


def _put_shard(store: Store, key: str, run: str, version: int, payloads: Sequence[Buffer]) -> wire.ShardRef:
    data, data_start = shard.pack_shard(run, version, payloads)
    store.put(key, data, create=True)
    return wire.ShardRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest(), data_start=data_start)


def _put_table(store: Store, key: str, table: VersionTable) -> wire.TableRef:
    data = table.to_bytes()
    store.put(key, data, create=True)
    return wire.TableRef(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _put_manifest(store: Store, manifest: wire.Manifest, attempt: str) -> wire.ObjectRef:
    key, data = names.manifest(manifest.version, attempt), manifest.to_bytes()
    store.put(key, data, create=True)
    return wire.ObjectRef(key=key, sha256=hashlib.sha256(data).hexdigest())
