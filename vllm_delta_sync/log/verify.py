"""Checking a whole log without a base: catalog, deltas, folds and anchors, every digest, block and state root.

Does not stop at the first fault, and does not repair: `repair` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta_sync.log.checking import (
    Checked,
    Fault,
    State,
    check_anchor,
    check_files,
    check_payload,
    check_target,
)
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire.catalog import Catalog, Fold
from vllm_delta_sync.wire.manifest import Manifest, ObjectRef

__all__ = ["Fault", "Verdict", "verify"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a walk of the log found. `bytes` counts the shards of versions and folds; version 0 is one of `versions`."""

    versions: int
    folds: int
    anchors: int
    blocks: int
    bytes: int
    faults: tuple[Fault, ...]


def verify(log: DeltaLog, *, progress: Progress = silent) -> Verdict:
    """Check version 0, all that the catalog names, and every delta from its `oldest` to the tip.

    Raises only when LATEST, the catalog or the chain of manifests cannot be read, or the store fails.
    """
    pointer = log.latest()
    catalog, base = log.catalog(pointer), log.base(pointer)
    chain = log.chain(catalog.oldest, log.tip(pointer))
    refs = {manifest.version - 1: manifest.parent for manifest in chain if manifest.parent is not None}
    refs |= {0: pointer.base, pointer.version: pointer.manifest}
    walk = _Walk(log, catalog, refs, len(chain) + len(catalog.folds) + len(catalog.anchors) + 1, progress)
    state = walk.payload(base, None)
    if base.anchor is not None:
        walk.faults += check_files(log, 0, base.anchor.files)
    walk.anchors()
    walk.before_deltas(state)
    for manifest in chain:
        walk.delta(manifest)
    for version in walk.left():
        walk.folds_from(version)
    progress("verifying", walk.total, walk.total)
    return Verdict(
        versions=len(chain) + 1,
        folds=len(catalog.folds),
        anchors=len(catalog.anchors),
        blocks=walk.blocks,
        bytes=sum(one.totals.bytes for one in (base, *chain)) + sum(fold.totals.bytes for fold in catalog.folds),
        faults=tuple(walk.faults),
    )


class _Walk:
    """Goes up through the versions with what is known of the state at each, and checks each thing once."""

    def __init__(
        self, log: DeltaLog, catalog: Catalog, refs: dict[int, ObjectRef], total: int, progress: Progress
    ) -> None:
        self.log, self.catalog, self.total = log, catalog, total
        self.faults: list[Fault] = []
        self.blocks = 0
        self._refs = refs
        self._progress = progress
        self._done = 0
        self._known: dict[int, State] = {}  # the states at versions that are yet to come
        self._folds: dict[int, list[Fold]] = {}
        for fold in catalog.folds:
            self._folds.setdefault(fold.source, []).append(fold)

    def payload(self, payload: Manifest | Fold, before: State | None) -> State | None:
        self._progress("verifying", self._done, self.total)
        self._done += 1
        return self._noted(check_payload(self.log, payload, before))

    def _noted(self, checked: Checked) -> State | None:
        self.faults += checked.faults
        self.blocks += checked.blocks
        return checked.state

    def anchors(self) -> None:
        for anchor in self.catalog.anchors:
            self._progress("verifying", self._done, self.total)
            self._done += 1
            self.faults += check_target(self.log, anchor, self._refs.get(anchor.version))
            state = self._noted(check_anchor(self.log, anchor))
            if state is not None:
                self._known[anchor.version] = state

    def before_deltas(self, base: State | None) -> None:
        """Everything that begins at a version whose own deltas may be gone."""
        if base is not None:
            self._known[0] = base
        for version in sorted(source for source in self._folds if source < self.catalog.oldest):
            self.folds_from(version)

    def delta(self, manifest: Manifest) -> None:
        self.folds_from(manifest.version - 1)
        state = self.payload(manifest, self._known.pop(manifest.version - 1, None))
        if state is not None:
            self._known[manifest.version] = state

    def left(self) -> list[int]:
        """The versions, the tip and any beyond it, that folds begin at and no delta does."""
        return sorted(self._folds)

    def folds_from(self, version: int) -> None:
        for fold in self._folds.pop(version, []):
            self.faults += check_target(self.log, fold, self._refs.get(fold.to))
            state = self.payload(fold, self._known.get(version))
            if state is not None and fold.to > version:
                self._known.setdefault(fold.to, state)
