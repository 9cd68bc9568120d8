"""Following the log: the tip, base and catalog, manifests by digest, the chain, and the tables and blocks of payloads.

Does not cache, poll or retry, and does not apply anything: `materialize` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from vllm_delta_sync.errors import MalformedObject, VersionGap
from vllm_delta_sync.log import fetch, materialize, names
from vllm_delta_sync.log import payload as payloads
from vllm_delta_sync.log.base import Base, Tensor
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.store import Content, ObjectInfo, Store, child, open_store
from vllm_delta_sync.wire import canonical_json
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import Found, LatestPointer, Manifest, ObjectRef
from vllm_delta_sync.wire.payload import Payload, parts_of
from vllm_delta_sync.wire.table import Block, VersionTable

MAX_CHAIN = 1 << 18  # versions from the oldest delta to the tip: what a reader walks, and plans over, at most

_RUN_ID = re.compile(r"[0-9a-f]{32}")


class DeltaLog:
    """One run of a log. Every method raises StoreError of some kind when the store fails."""

    def __init__(self, store: Store, run: str) -> None:
        self.store = store  # rooted at the run
        self.run = run

    @classmethod
    def open(cls, where: str | os.PathLike[str] | Store, run: str | None = None) -> DeltaLog:
        """The run of that id, or the current one, of the log at a URI, path or store.

        Raises NotFound when nothing is published yet, MalformedObject when RUN does not hold a run's id.
        """
        root = open_store(os.fspath(where)) if isinstance(where, str | os.PathLike) else where
        if run is None:
            run = fetch.bounded(root, names.RUN, 64).decode("ascii", "replace")
        if not _RUN_ID.fullmatch(run):
            raise MalformedObject(f"{root.uri}: {run[:64]!r} is not the id of a run, 32 hex digits")
        return cls(child(root, run), run)

    def latest(self, at: ObjectInfo | None = None) -> LatestPointer:
        """What LATEST says now, or said `at` what the store's `head` told of it, where that can be fetched by content.

        Raises NotFound, MalformedObject, or VersionGap when it is another run's.
        """
        key = f"{self.store.uri}/{names.LATEST}"
        content = Content(at.content, at.size) if at is not None and at.content is not None else None
        data = fetch.bounded(self.store, names.LATEST, canonical_json.MAX_BYTES, content)
        pointer = LatestPointer.from_bytes(data, key)
        self._require_own(pointer.run, key)
        return pointer

    def manifest(self, ref: ObjectRef) -> Manifest:
        """The manifest of a reference, verified. Raises NotFound, DigestMismatch, MalformedObject or VersionGap."""
        manifest = Manifest.from_bytes(fetch.verified(self.store, ref), f"{self.store.uri}/{ref.key}")
        self._require_own(manifest.run, f"{self.store.uri}/{ref.key}")
        return manifest

    def unreferenced_manifest(self, key: str) -> Manifest:
        """A manifest found by listing, with no digest to verify it by. Raises NotFound, MalformedObject, VersionGap."""
        data = fetch.bounded(self.store, key, canonical_json.MAX_BYTES)
        manifest = Manifest.from_bytes(data, f"{self.store.uri}/{key}")
        self._require_own(manifest.run, f"{self.store.uri}/{key}")
        return manifest

    def tip(self, pointer: LatestPointer | None = None) -> Manifest:
        """The manifest that LATEST (or `pointer`, which it said before) points to."""
        return self._named("version", (pointer := pointer or self.latest()).version, pointer.manifest)

    def base(self, pointer: LatestPointer | None = None) -> Manifest:
        """The manifest of version 0 that LATEST (or `pointer`, which it said before) names."""
        return self._named("base", 0, (pointer or self.latest()).base)

    def catalog(self, pointer: LatestPointer | None = None) -> Catalog:
        """The catalog that LATEST (or `pointer`, which it said before) names; an empty one when it names none.

        Raises as `manifest` does, and as `require_reach`.
        """
        pointer = pointer or self.latest()
        catalog = self.catalog_of_any_reach(pointer)
        self.require_reach(pointer, catalog)
        return catalog

    def catalog_of_any_reach(self, pointer: LatestPointer) -> Catalog:
        """The same, however many versions follow its `oldest`: for who lets old ones go. Raises as `manifest` does."""
        catalog, ref = Catalog(run=self.run), pointer.catalog
        if ref is not None:
            catalog = Catalog.from_bytes(fetch.verified(self.store, ref), f"{self.store.uri}/{ref.key}")
            self._require_own(catalog.run, f"{self.store.uri}/{ref.key}")
        return catalog

    def require_reach(self, pointer: LatestPointer, catalog: Catalog) -> None:
        """Raise VersionGap when more versions follow the catalog's `oldest` than anybody plans over."""
        if pointer.version - catalog.oldest > MAX_CHAIN:
            raise VersionGap(
                f"{self.store.uri}: LATEST says version {pointer.version}, and the deltas begin at {catalog.oldest}: "
                f"at most {MAX_CHAIN} are planned over; let old ones go (gc), or begin a new run"
            )

    def _named(self, what: str, version: int, ref: ObjectRef) -> Manifest:
        manifest = self.manifest(ref)
        if manifest.version != version:
            raise VersionGap(
                f"{self.store.uri}: LATEST says {what} {version}, the manifest it names {manifest.version}"
            )
        return manifest

    def chain(self, after: int, to: Manifest) -> list[Manifest]:
        """The manifests of versions after+1 … to.version, ascending; −1 begins with the base.

        Raises VersionGap when the chain goes backwards or is broken.
        """
        if not -1 <= after <= to.version or to.version - after > MAX_CHAIN:
            raise VersionGap(
                f"{self.store.uri}: no chain from version {after} to {to.version}; "
                f"it must go forward, {MAX_CHAIN} versions at most"
            )
        found = [to] if to.version > after else []
        while found and found[-1].version > after + 1:
            found.append(self.parent(found[-1]))
        return found[::-1]

    def manifests(self) -> list[Manifest]:
        """All versions that are left: the base, then from where the deltas begin to the tip."""
        pointer = self.latest()
        return [self.base(pointer), *self.chain(self.catalog(pointer).oldest, self.tip(pointer))]

    def table(self, payload: Payload) -> VersionTable:
        """The table of a version or a fold, verified, and consistent with the manifest or catalog that states it."""
        return payloads.read_table(self.store, parts_of(payload))

    def base_table(self) -> VersionTable:
        """The table of version 0: every tensor and its state hash."""
        return self.table(self.base())

    def states(self, ref: Found, state_root: str) -> VersionTable:
        """An anchor's table of all tensors' states, verified, and consistent with the state root of its version."""
        return payloads.read_states(self.store.uri, ref, state_root, lambda: fetch.verified(self.store, ref))

    def blocks(self, payload: Payload, rows: Sequence[Block]) -> Iterator[tuple[Block, Buffer]]:
        """These rows of the table of a version or a fold with their stored bytes, still encoded, shard by shard.

        A shard is fetched and verified whole, and only if one of the rows is in it.
        """
        return payloads.read_blocks(self.store, self.run, parts_of(payload), rows)

    def materialize(self, version: int, base: Base = None, *, progress: Progress = silent) -> dict[str, Tensor]:
        """The whole model at a version; see `log.materialize.materialize`."""
        return materialize.materialize(self, version, base, progress=progress)

    def parent(self, manifest: Manifest) -> Manifest:
        """The version before that of a manifest; raises VersionGap when it has none, or has another number."""
        if manifest.parent is None:
            raise VersionGap(f"{self.store.uri}: version {manifest.version} has no parent")
        parent = self.manifest(manifest.parent)
        if parent.version != manifest.version - 1:
            raise VersionGap(
                f"{self.store.uri}/{manifest.parent.key}: version {parent.version} is parent of {manifest.version}; "
                "versions must be contiguous"
            )
        return parent

    def _require_own(self, run: str, key: str) -> None:
        if run != self.run:
            raise VersionGap(f"{key}: of run {run}, but this is the log of run {self.run}")
