"""Writing versions: shards and manifest, and only then LATEST; and catalogs, with LATEST after them.

Does not diff, encode or retry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vllm_delta_sync.errors import DeltaSyncError, MalformedObject, NotFound, RivalWriter, VersionGap
from vllm_delta_sync.log import anchors, names, payload, pointer
from vllm_delta_sync.log.catalogs import Catalogs, put_document
from vllm_delta_sync.log.discarding import discarding
from vllm_delta_sync.log.draft import Change, Draft
from vllm_delta_sync.log.packing import Packed, TensorUpdate, pack
from vllm_delta_sync.log.pointer import Seen
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.rivals import Lookout, described
from vllm_delta_sync.log.stamps import SYSTEM, Stamps
from vllm_delta_sync.store import Batch, Store, child, open_store, together
from vllm_delta_sync.wire import manifest as wire
from vllm_delta_sync.wire import shard, state_hash
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.state_hash import Lanes
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

logger = logging.getLogger(__name__)


class LogWriter:
    """The one writer of a run. Not for use from several threads at once.

    Args:
        at: what LATEST says.
        tip: the manifest it points to.
        shard_bytes: what a shard is filled to.
        stamps: the clock, and where fresh names come from.
    """

    def __init__(
        self,
        log: DeltaLog,
        at: wire.LatestPointer,
        tip: wire.Manifest,
        *,
        shard_bytes: int = shard.TARGET_BYTES,
        stamps: Stamps = SYSTEM,
    ) -> None:
        self.log = log
        self.tip = tip
        self._pointer = at
        self._seen: Seen | None = None
        self._manifests = {at.manifest.sha256}
        self._catalogs = Catalogs(log, at, stamps)
        self._given_up: dict[str, int] = {}  # versions whose write of LATEST failed, by SHA-256; it may arrive late
        self._lookout = Lookout(log)
        self._shard_bytes = shard_bytes
        self._stamps = stamps

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
        stamps: Stamps = SYSTEM,
    ) -> LogWriter:
        """Begin a new run at version 0 and make it the current one.

        Args:
            base_table: every tensor of the model with its lanes u32[4] at version 0.
            base: where others find the checkpoint of version 0, or None when only the anchor has it.
            anchor: files of that checkpoint to put into the run.
        """
        root = open_store(where) if isinstance(where, str) else where
        run, attempt = stamps.fresh(), stamps.fresh()
        log = DeltaLog(child(root, run), run)
        specs = tuple(sorted(base_table, key=lambda spec: spec.name.encode()))
        hashes = np.array([base_table[spec] for spec in specs], np.uint32).reshape(-1, 4)
        elements = sum(spec.numel for spec in specs)
        keys = names.shards(names.version_prefix(0), attempt, 1)
        with discarding(log.store, [*anchors.keys(0, anchor), *keys, names.manifest(0, attempt)]):
            files = anchors.write(log.store, 0, anchor) if anchor else None
            with together(log.store) as batch:
                written = payload.write(batch, Ends(run, 0, 0), Packed(VersionTable(specs, hashes, ()), ([],)), keys)
                manifest = wire.Manifest(
                    run=run,
                    version=0,
                    kind="base",
                    parent=None,
                    created=stamps.now(),
                    step=step,
                    metadata=dict(metadata or {}),
                    base=base,
                    anchor=files,
                    totals=written.totals(len(specs), elements),
                    shards=written.shards,
                    table=written.table,
                    state_root=state_hash.state_root(base_table),
                )
                ref = _put_manifest(batch, manifest, attempt)
        at = wire.LatestPointer(run=run, sequence=0, version=0, manifest=ref, base=ref)
        info = log.store.put(names.LATEST, at.to_bytes(), create=True)
        root.put(names.RUN, run.encode())
        writer = cls(log, at, manifest, stamps=stamps)
        writer._seen = Seen(at, info)
        return writer

    @classmethod
    def attach(cls, log: DeltaLog) -> LogWriter:
        """Continue a run from its tip."""
        at = log.latest()
        writer = cls(log, at, log.tip(at))
        writer._lookout.arrive(at.version + 1)
        return writer

    def commit(
        self,
        updates: Sequence[TensorUpdate],
        *,
        state_root: str,
        step: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> wire.Manifest:
        """Write the version after the tip and make it the tip; without updates it is one in which nothing changed.

        LATEST then names the catalog that was offered, too, or goes without one that would have to be made anew and
        cannot be. Raises RivalWriter when another publisher writes to this run, StoreError when the store fails,
        UnsettledWrite when it fails so that only a writer that is attached anew can go on. The tip of this writer is
        then as before.
        """
        version, attempt = self.tip.version + 1, self._stamps.fresh()
        packed = pack(updates, self._shard_bytes)
        payload.require_fits(packed, f"version {version}")
        keys = names.shards(names.version_prefix(version), attempt, len(packed.shards))
        self._lookout.begin(version, attempt)
        with discarding(self.log.store, [*keys, names.manifest(version, attempt)]):
            with together(self.log.store) as batch:
                written = payload.write(batch, Ends(self.log.run, version - 1, version), packed, keys)
                manifest = wire.Manifest(
                    run=self.log.run,
                    version=version,
                    kind="delta",
                    parent=self._pointer.manifest,
                    created=self._stamps.now(),
                    step=step,
                    metadata=dict(metadata or {}),
                    base=None,
                    anchor=None,
                    totals=written.totals(self.tip.totals.tensors, self.tip.totals.elements),
                    shards=written.shards,
                    table=written.table,
                    state_root=state_root,
                )
                ref = _put_manifest(batch, manifest, attempt)
            seen = self._look()
            self._lookout.require_alone(self._pointer.manifest)  # takes a while, so `update` looks again
        self._manifests.add(ref.sha256)  # from here on LATEST may name it
        try:
            self._update(lambda own: self._and_catalog(own, {"version": version, "manifest": ref}), seen)
        except BaseException:
            self._manifests.discard(ref.sha256)
            self._given_up[ref.sha256] = version
            raise
        self.tip = manifest
        return manifest

    def put_catalog(self, change: Change) -> Catalog:
        """Make what `change` makes of the run's catalog its catalog, at once; returns it.

        `change` may be asked more than once: when somebody else (a pin, say) wrote another catalog meanwhile.
        Raises as `commit` does.
        """
        self._look()
        with together(self.log.store) as batch:
            draft = self.draft_catalog(change, batch)
        self.offer_catalog(draft)
        self.put_offered()
        return self._catalogs.present(self._pointer)

    def draft_catalog(self, change: Change, batch: Batch) -> Draft:
        """Put, as part of a batch, what `change` makes of the catalog to come; to be offered when the batch has ended.

        Raises what reading the present catalog raises, and what the store raises.
        """
        return self._catalogs.draft(change, batch, self._pointer)

    def offer_catalog(self, draft: Draft) -> None:
        """Let LATEST name this catalog when it is written next, be it by `commit` or by `put_offered`."""
        self._catalogs.offer(draft)

    def put_offered(self) -> None:
        """Let LATEST name the catalog that was offered, if one was, now. Raises as `commit` does."""
        if self._catalogs.offered:
            self._update(self._catalogs.named, self._look())

    @property
    def offered(self) -> bool:
        """Whether a catalog waits for LATEST to name it."""
        return self._catalogs.offered

    def _and_catalog(self, own: wire.LatestPointer, version: Mapping[str, object]) -> wire.LatestPointer:
        """With a new version, and the catalog that was offered unless that cannot be: no version waits for folds."""
        try:
            own = self._catalogs.named(own)
        except DeltaSyncError as error:
            logger.warning("the newest folds and anchors of %s are left out: %s", self.log.store.uri, error)
            self._catalogs.withdraw()
        return own.model_copy(update=version)

    def _look(self) -> Seen:
        """LATEST, which is this writer's; RivalWriter if not."""
        try:
            seen = pointer.look(self.log, self._seen)
        except (NotFound, MalformedObject, VersionGap) as error:
            raise self._rival(f"nothing that can be read ({error})") from error
        self._carried(seen.pointer)
        return seen

    def _update(self, change: Callable[[wire.LatestPointer], wire.LatestPointer], seen: Seen) -> None:
        self._seen = pointer.update(
            self.log, lambda found: change(self._carried(found)), seen, sleep=self._stamps.sleep
        )
        self._pointer = self._seen.pointer
        self._catalogs.settle(self._pointer)

    def _carried(self, found: wire.LatestPointer) -> wire.LatestPointer:
        # One that was given up and came late is overwritten by what took its place; nothing has yet: it stands.
        late = {sha256 for sha256, version in self._given_up.items() if version <= self._pointer.version}
        own = pointer.carried(self._pointer, found, self._manifests | late, self._catalogs.own)
        if own is None:
            raise self._rival(described(self.log, found.manifest, found.version))
        self._pointer = own
        return own

    def _rival(self, named: str) -> RivalWriter:
        return RivalWriter(
            f"{self.log.store.uri}/{names.LATEST} names {named}, not version {self._pointer.version} "
            f"({self._pointer.manifest.key}) as this writer left it: another publisher writes to this run, or a write "
            "that was reported as failed arrived after all; stop the other one, or resume from the log"
        )


def _put_manifest(store: Batch, manifest: wire.Manifest, attempt: str) -> wire.ObjectRef:
    return put_document(store, names.manifest(manifest.version, attempt), manifest.to_bytes())
