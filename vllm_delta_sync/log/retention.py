"""What of a run may be deleted without taking a way from any reader, as pure functions over its catalog and its keys.

Does not read or delete anything: `collection` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.log import names
from vllm_delta_sync.log.plan import Edge, plan
from vllm_delta_sync.wire.catalog import Catalog, Fold

Fate = Literal["needed", "expired", "leftover", "young", "undated", "foreign"]
GOES: frozenset[Fate] = frozenset({"expired", "leftover"})

_UUID = r"[0-9a-f]{32}"
_SHARD = rf"{_UUID}-\d{{5}}-of-\d{{5}}\.safetensors"
_OF_VERSION = re.compile(rf"versions/(\d{{20}})/(?:{_UUID}\.manifest\.json|{_SHARD})")
_OTHERS = re.compile(
    rf"folds/\d{{20}}-\d{{20}}/{_SHARD}|catalogs/\d{{20}}-{_UUID}\.json|anchors/\d{{20}}/(?:{_UUID}/)?[^/]+"
)


@dataclass(frozen=True, slots=True)
class Sorted:
    """An object of a run, and whether it goes: `expired` and `leftover` do; `why` says it in words."""

    key: str
    fate: Fate
    why: str


def retain(catalog: Catalog, tip: int, *, keep_versions: int | None, keep_anchors: int) -> Catalog:
    """The catalog that is left when only readers at version 0, at an anchor, or from its `oldest` on must be served.

    Each of them still reaches the tip, and each version from `oldest` on is still reached from version 0's checkpoint
    or an anchor, provided both were so before. Folds that go back go: they serve a pin, and none is set.

    Args:
        keep_versions: how many of the newest versions keep their deltas, at least; None keeps all there are.
        keep_anchors: how many of the newest anchors stay, at least.
    """
    anchors = sorted(catalog.anchors, key=lambda anchor: anchor.version)
    forward = [fold for fold in catalog.folds if fold.to > fold.source]
    kept = anchors[max(0, len(anchors) - keep_anchors) :]
    for anchor in reversed(anchors[: len(anchors) - len(kept)]):
        # The deltas that are left may begin where only this one leads.
        missing = catalog.oldest not in reached((0, *(one.version for one in kept)), forward)
        if missing and catalog.oldest in reached((anchor.version,), forward):
            kept.insert(0, anchor)
    starts = (0, *(anchor.version for anchor in kept))
    wanted = catalog.oldest if keep_versions is None else max(catalog.oldest, tip - keep_versions)
    # From a start one goes on by its folds, or over any newer anchor: all there is when none of them leads on.
    onward = {start: reached([start, *(other for other in starts if other > start)], forward) for start in starts}
    possible = [
        version
        for version in range(catalog.oldest, wanted + 1)
        if all(version in onward[start] for start in starts if start <= version)
    ]
    oldest = max(possible, default=catalog.oldest)
    needed = {fold.shards[0].key for fold in leading_to(oldest, starts, forward)}
    folds = tuple(fold for fold in forward if fold.source >= oldest or fold.shards[0].key in needed)
    return catalog.model_copy(update={"oldest": oldest, "folds": folds, "anchors": tuple(kept)})


def reached(starts: Iterable[int], forward: Iterable[Fold]) -> set[int]:
    found = set(starts)
    for fold in sorted(forward, key=lambda fold: fold.source):
        if fold.source in found:
            found.add(fold.to)
    return found


def leading_to(oldest: int, starts: Iterable[int], forward: Iterable[Fold]) -> list[Fold]:
    """The folds of the cheapest way from each start that is older to where the deltas begin."""
    folds = {Edge(fold.source, fold.to, fold.totals.bytes): fold for fold in forward if fold.to <= oldest}
    needed: list[Fold] = []
    for start in starts:
        if start < oldest:
            try:
                way = plan(folds, start, oldest)
            except VersionGap:
                continue  # a reader there goes over an anchor
            needed += [folds[edge] for edge in way]
    return needed


def sort_keys(
    keys: Iterable[str],
    needed: Iterable[str],
    dropped: Iterable[str],
    oldest: int,
    ages: Mapping[str, float],
    grace: float,
) -> list[Sorted]:
    """Say of each key of a run whether it goes, and why; in the order of the keys.

    Args:
        needed: keys that LATEST leads to, once the new catalog is in place.
        dropped: keys that only the catalog before it leads to.
        oldest: of the new catalog.
        ages: seconds since an object was written, for those whose age is known.
        grace: seconds; what no reference leads to and is younger may be an object whose reference comes next.
    """
    kept, expired = frozenset(needed), frozenset(dropped)
    return [_sort(key, kept, expired, oldest, ages.get(key), grace) for key in keys]


def unreferenced(keys: Iterable[str], needed: Iterable[str], dropped: Iterable[str], oldest: int) -> list[str]:
    """The keys whose age decides: those that `sort_keys` calls undated when it knows no ages."""
    return [found.key for found in sort_keys(keys, needed, dropped, oldest, {}, 0.0) if found.fate == "undated"]


def _sort(
    key: str, needed: frozenset[str], dropped: frozenset[str], oldest: int, age: float | None, grace: float
) -> Sorted:
    if key in needed or key == names.LATEST:
        return Sorted(key, "needed", "LATEST leads to it")
    of_version = _OF_VERSION.fullmatch(key)
    if of_version is not None and int(of_version[1]) <= oldest:
        return Sorted(key, "expired", f"the deltas that are kept begin after version {oldest}")
    if of_version is None and _OTHERS.fullmatch(key) is None:
        return Sorted(key, "foreign", "not a name that a log gives; left alone")
    if key in dropped:
        return Sorted(key, "expired", f"no reader from version {oldest} on needs it")
    if age is None:
        return Sorted(key, "undated", "nothing leads to it, but the store does not tell its age; left alone")
    if age < grace:
        return Sorted(key, "young", f"nothing leads to it, but it was written {age:.0f} s ago; left alone")
    return Sorted(key, "leftover", f"nothing leads to it, and it was written {age / 3600:.1f} h ago")
