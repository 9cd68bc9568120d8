"""Pinning a run to a version, to which every follower goes and stays, also backwards; and letting them follow again.

Does not compose folds itself, and does not stop the publisher: its versions wait until the pin is taken away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_delta_sync.errors import Unavailable, VersionGap
from vllm_delta_sync.log import pointer as latest
from vllm_delta_sync.log.base import Base
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.folding import write_fold
from vllm_delta_sync.log.plan import Edge, admissible, plan
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.settling import settled
from vllm_delta_sync.wire.catalog import Catalog, Fold
from vllm_delta_sync.wire.manifest import LatestPointer

RECENT = 2  # versions from the tip on down from which a fold leads straight back: where followers in step may be
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Pinned:
    """What LATEST says now, and the folds that were written for it."""

    pointer: LatestPointer
    folds: tuple[Fold, ...]


def pin(
    log: DeltaLog,
    version: int,
    base: Base = None,
    *,
    sleep: Callable[[float], object] = time.sleep,
    progress: Progress = silent,
) -> Pinned:
    """Make every follower go to a version and stay there, until `unpin`.

    From the newest versions, which followers in step hold, a fold leads straight back; one that is further behind, but
    beyond the pin, goes over the tip. Versions that are published from then on are taken up only after `unpin`.

    Args:
        base: the checkpoint of version 0, as for `materialize`; used only where the way back cannot be composed of what
            is in the log.

    Raises VersionGap when there is no such version or no way to it, Unavailable when LATEST does not stay as it was
    written, and what `write_fold` raises.
    """
    written: dict[int, Fold] = {}
    reached: int | None = None  # the tip when the pin was set: followers hold nothing newer
    newest: LatestPointer | None = None
    for _ in range(_ATTEMPTS):
        now = latest.look(log).pointer
        newest = _newer(newest, now)
        if version > newest.version:
            raise VersionGap(f"{log.store.uri}: there is no version {version}; the newest is {newest.version}")
        holds = now.pin == version and now.version == newest.version
        if not holds or reached is None:
            reached = newest.version
        sources = missing(log.catalog(now), reached, version, now.pin)
        if holds and not sources and (last := settled(log, lambda found: found.pin == version, sleep)) is not None:
            if last.version >= newest.version:
                return Pinned(last, tuple(written.values()))
            continue
        for source in sources:
            if source not in written:
                written[source] = write_fold(log, source, version, base, progress=progress)
        reached, newest = _put(log, version, written.values(), reached, newest)
    raise Unavailable(
        f"{log.store.uri}: the pin to version {version} did not last, or the tip moved on, {_ATTEMPTS} times in a row; "
        "is another pin being written? Try again"
    )


def unpin(log: DeltaLog, *, sleep: Callable[[float], object] = time.sleep) -> LatestPointer:
    """Let followers go to the tip again; returns what LATEST says then. Raises Unavailable as `pin` does."""
    if (found := latest.look(log).pointer).pin is None:
        return found
    for _ in range(_ATTEMPTS):
        found = _take_away(log, found)
        if (last := settled(log, lambda now: now.pin is None, sleep)) is not None and last.version >= found.version:
            return last
    raise Unavailable(f"{log.store.uri}: a pin came back {_ATTEMPTS} times in a row; is somebody else pinning?")


def _take_away(log: DeltaLog, newest: LatestPointer) -> LatestPointer:
    return latest.update(log, lambda current: _forward(current, newest, None)).pointer


def _newer(newest: LatestPointer | None, found: LatestPointer) -> LatestPointer:
    return found if newest is None or found.version > newest.version else newest


def _forward(current: LatestPointer, newest: LatestPointer, pin: int | None) -> LatestPointer:
    """LATEST with that pin. Where a write of ours took it back to an older version than was seen, it is taken forward.

    That can be only where the store has no conditional writes, and a publisher wrote between our look and our write.
    """
    at = _newer(current, newest)
    return current.model_copy(update={"version": at.version, "manifest": at.manifest, "pin": pin})


def missing(catalog: Catalog, tip: int, version: int, pin: int | None = None) -> list[int]:
    """The versions where followers may be from which no way leads straight back to a pinned one, the newest first.

    They are at the newest versions, or where `pin` held them until now. Straight: over nothing newer than the version
    left, and nothing older than the pinned one.
    """
    edges = [Edge(fold.source, fold.to, fold.totals.bytes) for fold in catalog.folds]
    edges += [Edge(None, anchor.version, anchor.bytes) for anchor in catalog.anchors]
    edges += [Edge(n - 1, n, 0) for n in range(max(catalog.oldest, version) + 1, tip + 1)]
    places = {*range(tip, tip - RECENT, -1), *(() if pin is None else (pin,))}
    found = []
    for source in sorted((place for place in places if place > version), reverse=True):
        try:
            plan(admissible(edges, source, version), source, version)
        except VersionGap:
            found.append(source)
    return found


def _put(
    log: DeltaLog, version: int, folds: Iterable[Fold], reached: int, newest: LatestPointer
) -> tuple[int, LatestPointer]:
    """Set the pin and name the folds, in one write, so that nobody sees the one without the other.

    Returns the newest version that a follower may hold, `reached` if the pin was there before, and what was written.
    """
    was_set = False

    def change(current: LatestPointer) -> LatestPointer:
        nonlocal was_set
        was_set = current.pin == version
        forward = _forward(current, newest, version)
        catalog = log.catalog(current)
        known = {fold.shards[0].key for fold in catalog.folds}
        new = tuple(fold for fold in folds if fold.shards[0].key not in known)
        if not new:
            return forward
        whole = catalog.model_copy(update={"folds": (*catalog.folds, *new)})
        ref = put_catalog(log.store, whole, current.sequence + 1)
        return forward.model_copy(update={"catalog": ref})

    written = latest.update(log, change).pointer
    return reached if was_set else written.version, written
