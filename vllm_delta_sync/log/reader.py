"""Following the log: the tip, manifests by digest, the chain of versions, their tables and blocks.

Does not cache, poll or retry, and does not apply anything: `materialize` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from vllm_delta_sync.errors import MalformedObject, VersionGap
from vllm_delta_sync.log import fetch, materialize, names
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.store import Store, child, open_store
from vllm_delta_sync.wire import canonical_json, consistency, shard
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest, ObjectRef
from vllm_delta_sync.wire.table import Block, VersionTable

MAX_CHAIN = 1 << 20  # versions walked in one go

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

    def latest(self) -> LatestPointer:
        """What LATEST says now. Raises NotFound, MalformedObject, or VersionGap when it is another run's."""
        key = f"{self.store.uri}/{names.LATEST}"
        data = fetch.bounded(self.store, names.LATEST, canonical_json.MAX_BYTES)
        pointer = LatestPointer.from_bytes(data, key)
        self._require_own(pointer.run, key)
        return pointer

    def manifest(self, ref: ObjectRef) -> Manifest:
        """The manifest of a reference, verified. Raises NotFound, DigestMismatch, MalformedObject or VersionGap."""
        data = fetch.bounded(self.store, ref.key, canonical_json.MAX_BYTES)
        fetch.check_sha256(self.store, ref, data)
        manifest = Manifest.from_bytes(data, f"{self.store.uri}/{ref.key}")
        self._require_own(manifest.run, f"{self.store.uri}/{ref.key}")
        return manifest

    def tip(self) -> Manifest:
        """The manifest that LATEST points to."""
        pointer = self.latest()
        manifest = self.manifest(pointer.ref)
        if manifest.version != pointer.version:
            raise VersionGap(
                f"{self.store.uri}: LATEST says version {pointer.version}, the manifest it names {manifest.version}"
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
            found.append(self._parent(found[-1]))
        return found[::-1]

    def manifests(self) -> list[Manifest]:
        """All versions, from the base to the tip."""
        return self.chain(-1, self.tip())

    def table(self, manifest: Manifest) -> VersionTable:
        """The table of a version, verified, and consistent with the manifest."""
        ref = manifest.table
        table = VersionTable.from_bytes(fetch.verified(self.store, ref, ref.size), f"{self.store.uri}/{ref.key}")
        consistency.check(manifest, table)
        return table

    def base_table(self) -> VersionTable:
        """The table of version 0: every tensor and its state hash."""
        return self.table(self.manifests()[0])

    def shard_blocks(self, manifest: Manifest, index: int, blocks: Sequence[Block]) -> Iterator[tuple[Block, Buffer]]:
        """`blocks`, all of shard `index`, with their stored bytes, once the whole shard is verified; still encoded."""
        ref = manifest.shards[index]
        what = f"{self.store.uri}/{ref.key}"
        data = fetch.verified(self.store, ref, ref.size)
        blob = shard.open_shard(data, self.run, manifest.version, what)
        if len(data) - len(blob) != ref.data_start:
            raise MalformedObject(
                f"{what}: its data begins at {len(data) - len(blob)}, the manifest says {ref.data_start}"
            )
        for block in blocks:
            yield block, blob[block.offset : block.offset + block.stored]

    def block_bytes(self, manifest: Manifest, table: VersionTable) -> Iterator[tuple[Block, Buffer]]:
        """Every block of a version with its stored bytes, shard by shard."""
        for index, blocks in table.by_shard().items():
            yield from self.shard_blocks(manifest, index, blocks)

    def materialize(
        self, version: int, base: materialize.Base = None, *, progress: Progress = silent
    ) -> dict[str, materialize.Tensor]:
        """The whole model at a version; see `log.materialize.materialize`."""
        return materialize.materialize(self, version, base, progress=progress)

    def _parent(self, manifest: Manifest) -> Manifest:
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
