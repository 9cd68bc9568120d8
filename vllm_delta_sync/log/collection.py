"""Garbage collection of a run: works out what may go, says so, and deletes it if it is told to.

Does not decide what a reader may need: `retention` does. Deletes nothing while a version that stays
cannot be read, and takes nothing out of the catalog while a version is pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log import pointer as latest
from vllm_delta_sync.log import retention
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.settling import settled
from vllm_delta_sync.store import Dated
from vllm_delta_sync.wire.catalog import Anchor, Catalog, Fold
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest

DAY_S = 24 * 3600.0
_BATCH = 500  # keys deleted between two reports of progress
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection found. `objects` are all keys of the run, in order; those whose fate is in `retention.GOES` go.

    `oldest` is where the deltas that stay begin, `before` where they began. `deleted` counts objects.
    """

    before: int
    oldest: int
    objects: tuple[retention.Sorted, ...]
    deleted: int

    @property
    def going(self) -> tuple[retention.Sorted, ...]:
        """The objects that go, or would go."""
        return tuple(found for found in self.objects if found.fate in retention.GOES)


@dataclass(frozen=True, slots=True)
class _Plan:
    pointer: LatestPointer
    before: Catalog
    after: Catalog
    objects: tuple[retention.Sorted, ...]


def collect(
    log: DeltaLog,
    *,
    keep_versions: int | None = None,
    keep_anchors: int = 2,
    grace: float = DAY_S,
    delete: bool = False,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
    progress: Progress = silent,
) -> Collected:
    """Find what may go, and delete it if `delete`: the new catalog is in place before the first object goes.

    Args:
        keep_versions: how many of the newest versions keep their deltas, at least; None keeps all there are.
        keep_anchors: how many of the newest anchors stay, at least.
        grace: seconds for which an object that nothing leads to may still be one that is being published.
        clock: now, in Unix seconds.
        sleep: waits for so many seconds.

    Raises ConfigError for a number below its least, and what reading the chain raises when it cannot be walked.
    """
    if (keep_versions is not None and keep_versions < 0) or keep_anchors < 0 or grace < 0:
        raise ConfigError("versions and anchors to keep and the grace period must not be negative")
    for attempt in range(1, _ATTEMPTS + 1):
        found = _plan(log, keep_versions, keep_anchors, grace, clock)
        if not delete:
            return Collected(found.before.oldest, found.after.oldest, found.objects, 0)
        if _make_current(log, found, sleep):
            break
        if attempt == _ATTEMPTS:
            raise ConfigError(
                f"{log.store.uri}: another catalog was written {_ATTEMPTS} times while this one was worked out; try "
                "again when no folds or anchors are being written"
            )
    result = Collected(found.before.oldest, found.after.oldest, found.objects, 0)
    keys = [one.key for one in result.going]
    for first in range(0, len(keys), _BATCH):
        progress("deleting", first, len(keys))
        log.store.delete(keys[first : first + _BATCH])
    progress("deleting", len(keys), len(keys))
    return Collected(result.before, result.oldest, result.objects, len(keys))


def _plan(
    log: DeltaLog,
    keep_versions: int | None,
    keep_anchors: int,
    grace: float,
    clock: Callable[[], float],
) -> _Plan:
    pointer = log.latest()
    before = log.catalog_of_any_reach(pointer)
    after = before
    if pointer.pin is None:  # while it is set, any of the ways may be the one back to it, or on from it
        after = retention.retain(before, pointer.version, keep_versions=keep_versions, keep_anchors=keep_anchors)
    # Listed before the chain is read: what is published meanwhile is not in it.
    keys = list(log.store.list())
    needed = _needed(log, pointer, after)
    dropped = _of_catalog(before) - _of_catalog(after)
    loose = retention.unreferenced(keys, needed, dropped, after.oldest)
    written = log.store.modified(loose) if isinstance(log.store, Dated) else {}
    now = clock()
    ages = {key: now - at for key, at in written.items()}
    objects = retention.sort_keys(keys, needed, dropped, after.oldest, ages, grace)
    return _Plan(pointer, before, after, tuple(objects))


def _make_current(log: DeltaLog, found: _Plan, sleep: Callable[[float], object]) -> bool:
    """Let LATEST name the new catalog; False when the one it was made from is not the current one any more."""
    moved = False

    def change(current: LatestPointer) -> LatestPointer:
        nonlocal moved
        moved = current.catalog != found.pointer.catalog or current.pin != found.pointer.pin
        if moved or found.after == found.before:
            return current
        return current.model_copy(update={"catalog": put_catalog(log.store, found.after, current.sequence + 1)})

    if found.after == found.before:
        return latest.look(log).pointer.catalog == found.pointer.catalog
    written = latest.update(log, change).pointer
    if moved:
        return False
    # A publisher that looked before may put the old one back, which leads to what is about to go.
    return settled(log, lambda now: now.catalog == written.catalog, sleep) is not None


def _needed(log: DeltaLog, pointer: LatestPointer, catalog: Catalog) -> set[str]:
    base = log.base(pointer)
    found = {pointer.base.key, *_of_manifest(base), *_of_catalog(catalog)}
    if pointer.catalog is not None:
        found.add(pointer.catalog.key)
    found.add(pointer.manifest.key)
    for manifest in log.chain(catalog.oldest, log.tip(pointer)):
        found |= _of_manifest(manifest)
        if manifest.parent is not None:
            found.add(manifest.parent.key)  # also that of the oldest version, of which nothing else stays
    return found


def _of_manifest(manifest: Manifest) -> set[str]:
    files = manifest.anchor.files if manifest.anchor is not None else ()
    return {part.key for part in (*manifest.shards, *files)}


def _of_catalog(catalog: Catalog) -> set[str]:
    entries: list[Fold | Anchor] = [*catalog.folds, *catalog.anchors]
    return {key for entry in entries for key in _of_entry(entry)}


def _of_entry(entry: Fold | Anchor) -> Iterable[str]:
    yield entry.manifest.key
    if isinstance(entry, Fold):
        yield from (shard.key for shard in entry.shards)
    else:
        yield entry.table.key
        yield from (file.key for file in entry.checkpoint.files)
