"""Catalogs that a writer reads, puts and keeps until LATEST names them.

Does not write LATEST, or decide what a catalog holds.
"""

from __future__ import annotations

import hashlib

from vllm_delta_sync.errors import LogError, NotFound, PublishError
from vllm_delta_sync.log import names
from vllm_delta_sync.log.draft import Change, Draft, drafted
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.stamps import SYSTEM, Stamps
from vllm_delta_sync.store import Batch
from vllm_delta_sync.wire.canonical_json import MAX_BYTES
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef


class Catalogs:
    """The catalogs of one writer of a run.

    Args:
        at: what LATEST says.
        stamps: where fresh names come from.
    """

    def __init__(self, log: DeltaLog, at: LatestPointer, stamps: Stamps) -> None:
        self._log = log
        self._stamps = stamps
        self._held: Catalog | None = None  # the last one that was read or written
        self._held_at: ObjectRef | None = None  # what leads to that
        self._offered: Draft | None = None  # the one that LATEST is to name when it is written next
        self.own = {at.catalog.sha256} if at.catalog else set()
        """SHA-256 of those that LATEST may name because of this writer."""

    @property
    def offered(self) -> bool:
        """Whether one waits for LATEST to name it."""
        return self._offered is not None

    def present(self, at: LatestPointer) -> Catalog:
        """The catalog that LATEST names, or if that is lost or damaged the last one that was not: so it is replaced."""
        if self._held is None or self._held_at != at.catalog:
            try:
                self._held, self._held_at = self._log.catalog(at), at.catalog
            except (LogError, NotFound):
                if self._held is None:
                    raise
        return self._held

    def draft(self, change: Change, batch: Batch, at: LatestPointer) -> Draft:
        """Put, as part of a batch, what `change` makes of the catalog to come; to be offered when the batch has ended.

        Raises what reading the present catalog raises, and what the store raises.
        """
        before = self._offered
        catalog = change(self.present(at) if before is None else before.catalog)
        ref = put_catalog(batch, catalog, at.sequence + 1, self._stamps)
        if before is None:
            return drafted(catalog, ref, (change,), at)
        return before.then(catalog, ref, change, at.pin)

    def offer(self, draft: Draft) -> None:
        """Keep a draft for LATEST to name when it is written next."""
        self._offered = draft

    def withdraw(self) -> None:
        """Let LATEST go without the one that was offered."""
        self._offered = None

    def named(self, at: LatestPointer) -> LatestPointer:
        """What LATEST is to say to name the catalog that was offered, if one was; it is made anew where it has to be.

        Raises as `draft`.
        """
        draft = self._offered
        if draft is None:
            return at
        if not draft.may_follow(at):
            catalog = self.present(at)
            for change in draft.changes:
                catalog = change(catalog)
            ref = put_catalog(self._log.store, catalog, at.sequence + 1, self._stamps)
            draft = self._offered = drafted(catalog, ref, draft.changes, at)
        self.own.add(draft.ref.sha256)
        return at.model_copy(update={"catalog": draft.ref})

    def settle(self, at: LatestPointer) -> None:
        """LATEST was written, and says this."""
        named, draft = at.catalog, self._offered
        if named is not None:
            self.own.add(named.sha256)
        if draft is not None and draft.ref == named:
            self._held, self._held_at, self._offered = draft.catalog, named, None


def put_catalog(store: Batch, catalog: Catalog, sequence: int, stamps: Stamps = SYSTEM) -> ObjectRef:
    """Put a catalog, which nothing names yet, for LATEST as it will be at `sequence`; returns what leads to it."""
    return put_document(store, names.catalog(sequence, stamps.fresh()), catalog.to_bytes())


def put_document(store: Batch, key: str, data: bytes) -> ObjectRef:
    """Put a manifest or a catalog; returns what leads to it. Raises PublishError for one that no reader would take."""
    if len(data) > MAX_BYTES:
        raise PublishError(f"{key} would be {len(data)} bytes of JSON, at most {MAX_BYTES} are read")
    info = store.put(key, data)
    return ObjectRef(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data), content=info.content)
