"""The states that a run went through: how a model of unknown version finds its place in it by state hash.

Does not hash anything, and reads manifests and tables only, never a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import MalformedObject, StateHashMismatch, VersionGap
from vllm_delta_sync.log.plan import Edge, plan
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.retention import reached
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.catalog import Catalog, Fold
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest, ObjectRef
from vllm_delta_sync.wire.table import VersionTable

NEWEST = 1024  # versions before the tip that are looked at one by one; each takes a request or two

Lanes = npt.NDArray[np.uint32]  # [T, 4]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The model's state at a version: its manifest, and the lanes u32[T, 4] of all tensors in the base's order."""

    version: int
    ref: ObjectRef
    root: str
    lanes: Lanes


def locate(
    log: DeltaLog, pointer: LatestPointer, base: VersionTable, lanes: Lanes, judged: npt.NDArray[np.bool_]
) -> Place | None:
    """A version at which every judged tensor has these lanes, or None when there is none.

    Args:
        base: the table of version 0.
        lanes: u32[T, 4], in the order of `base`.
        judged: bool[T], the tensors whose lanes are known. When that is all of them, manifests alone can tell.

    Raises as `states` does.
    """
    if judged.all():
        root = state_hash.state_root(dict(zip(base.tensors, lanes, strict=True)))
        found = next((place for place in roots(log, pointer) if place[2] == root), None)
        return found and Place(*found, lanes)
    for place in states(log, pointer, base):
        if np.array_equal(place.lanes[judged], lanes[judged]):
            return place
    return None


def roots(log: DeltaLog, pointer: LatestPointer) -> Iterator[tuple[int, ObjectRef, str]]:
    """Versions with their manifests and state roots: 0, where anchors and folds end, then the NEWEST from the tip down.

    Raises as `states` does.
    """
    catalog = log.catalog(pointer)
    yield 0, pointer.base, log.base(pointer).state_root
    yield from ((anchor.version, anchor.manifest, anchor.state_root) for anchor in catalog.anchors)
    yield from ((fold.to, fold.manifest, fold.after) for fold in catalog.folds)
    ref, manifest = pointer.manifest, log.tip(pointer)
    while manifest.parent is not None:
        yield manifest.version, ref, manifest.state_root
        if manifest.version <= max(catalog.oldest, pointer.version - NEWEST) + 1:
            return  # what is older may be gone, or is too much to look through
        ref, manifest = manifest.parent, log.parent(manifest)


def states(log: DeltaLog, pointer: LatestPointer, base: VersionTable) -> Iterator[Place]:
    """Version 0, the anchors from the newest on, then the NEWEST versions that deltas lead to, ascending; none twice.

    Where neither anchors nor folds lead to one of those, none of them comes. Each is consistent with the state root
    that its manifest or the catalog states.

    Args:
        base: the table of version 0.

    Raises VersionGap when the chain of deltas cannot be followed, and what reading it raises.
    """
    catalog = log.catalog(pointer)
    first = Place(0, pointer.base, log.base(pointer).state_root, base.hashes)
    yield first
    starts = {0: first}
    for anchor in sorted(catalog.anchors, key=lambda anchor: -anchor.version):
        table = log.states(anchor.table, anchor.state_root)
        if table.tensors != base.tensors:
            raise MalformedObject(
                f"{log.store.uri}/{anchor.table.key}: the anchor of version {anchor.version} lists other tensors than "
                "version 0"
            )
        starts[anchor.version] = Place(anchor.version, anchor.manifest, anchor.state_root, table.hashes)
        yield starts[anchor.version]
    present = _first(log, catalog, starts, base, pointer.version - NEWEST)
    if pointer.version - present.version > NEWEST:
        return
    chain = log.chain(present.version, log.tip(pointer))
    refs = [manifest.parent for manifest in chain[1:]] + [pointer.manifest]
    for manifest, ref in zip(chain, refs, strict=True):
        assert ref is not None, "only version 0 has no parent"
        present = _after(log, present, manifest, ref, base)
        if manifest.version not in starts:
            yield present


def _first(log: DeltaLog, catalog: Catalog, starts: dict[int, Place], base: VersionTable, wanted: int) -> Place:
    """The state from which deltas lead on: of those that something leads to, the first from `wanted` on, or the last.

    It is none before `catalog.oldest`, and that one where nothing leads to any.
    """
    forward = [fold for fold in catalog.folds if fold.source < fold.to]
    folds = {Edge(fold.source, fold.to, fold.table.size): fold for fold in forward}
    possible = [version for version in reached(starts, forward) if version >= catalog.oldest] or [catalog.oldest]
    first = min((version for version in possible if version >= wanted), default=max(possible))
    try:
        way = plan([*folds, *(Edge(None, version, 0) for version in starts)], None, first)
    except VersionGap as error:
        raise VersionGap(f"{log.store.uri}: {error}; its deltas begin there") from None
    present = starts[way[0].to]
    for edge in way[1:]:
        present = _after(log, present, folds[edge], folds[edge].manifest, base)
    return present


def _after(log: DeltaLog, before: Place, payload: Manifest | Fold, ref: ObjectRef, base: VersionTable) -> Place:
    table = log.table(payload)
    what = f"{log.store.uri}/{payload.shards[0].key}"
    index = {spec.name: i for i, spec in enumerate(base.tensors)}
    table.require_known({spec.name: spec for spec in base.tensors}, what)
    hashes = before.lanes.copy()
    hashes[[index[spec.name] for spec in table.tensors]] = table.hashes
    version, stated = (
        (payload.to, payload.after) if isinstance(payload, Fold) else (payload.version, payload.state_root)
    )
    root = state_hash.state_root(dict(zip(base.tensors, hashes, strict=True)))
    if root != stated:
        raise StateHashMismatch(f"{what}: its table comes to state root {root} at version {version}, not {stated}")
    return Place(version, ref, root, hashes)
