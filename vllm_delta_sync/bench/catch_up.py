"""What catching up costs over the folds of a schedule, beside one fold of the whole way, for every start there is.

Does not fetch anything: it weighs the objects of a log that it writes itself, of a synthetic walk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync.bench.codings import ADAPTIVE, Coding, payload_bytes, write_log
from vllm_delta_sync.bench.step import Model
from vllm_delta_sync.bench.warm_walk import DRIFT, WarmWalk
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log import DeltaLog, FoldSchedule
from vllm_delta_sync.log.folding import write_scheduled
from vllm_delta_sync.log.layers import between
from vllm_delta_sync.log.plan import Edge, quickest
from vllm_delta_sync.log.shelf import Shelf
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.wire.checkpoint import write_checkpoint
from vllm_delta_sync.wire.shard import Ends


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A follower `behind` versions behind each possible tip."""

    behind: int  # versions
    starts: int  # how many were weighed
    worst: float  # bytes of the way that followers take over those of one fold of the whole way
    mean: float
    hops: int  # of that way, at most
    objects: int  # fetched at most


@dataclass(frozen=True, slots=True)
class Report:
    """What a schedule costs and gives."""

    changed: float  # share of the elements, per version
    delta_bytes: float  # per version
    fold_bytes: float  # per version, once every fold of the schedule has versions to begin at
    ways: tuple[CatchUp, ...]


def measure(
    directory: Path,
    schedule: FoldSchedule,
    *,
    elements: int,
    versions: int,
    behind: Iterable[int],
    drift: float = DRIFT,
    coding: Coding = ADAPTIVE,
) -> Report:
    """Write a walk of that many versions into an empty directory, fold it, and weigh the ways to catch up.

    Raises ConfigError when the walk is too short for the folds.
    """
    warm = schedule.longest - 1  # versions without all folds
    if versions <= warm:
        raise ConfigError(f"a walk of {versions} versions has no fold of {warm + 1}; give more versions")
    models = list(WarmWalk(elements, drift=drift).models(versions))
    log = write(open_store(os.fspath(directory / "bucket")), directory / "base", models, coding)
    write_scheduled(log, schedule, 1)
    manifests = log.manifests()
    folds = log.catalog().folds
    edges = [Edge(fold.source, fold.to, fold.totals.bytes) for fold in folds]
    edges += [Edge(one.version - 1, one.version, one.totals.bytes) for one in manifests[1:]]
    ideal = Ideal(log, models)
    return Report(
        changed=float(np.mean([one.totals.changed / one.totals.elements for one in manifests[1:]])),
        delta_bytes=float(np.mean([one.totals.bytes for one in manifests[1:]])),
        fold_bytes=sum(fold.totals.bytes for fold in folds if fold.to > warm) / (versions - warm),
        ways=tuple(weigh(edges, ideal, distance, versions) for distance in behind),
    )


def write(store: Store, base: Path, models: list[Model], coding: Coding = ADAPTIVE) -> DeltaLog:
    """A log of these models, without folds, whose base is written to the directory `base`."""
    write_checkpoint(base, models[0].values())
    return write_log(store, base, models, coding).log


class Ideal:
    """The size of one fold between any two versions of a log, as it would be if it were written."""

    def __init__(self, log: DeltaLog, models: list[Model]) -> None:
        self._run = log.run
        self._shelf = Shelf(log, log.latest())
        self._models = models

    def bytes(self, source: int, to: int) -> int:
        """Bytes of the shards of the fold from `source` to `to`."""
        layer = between(self._shelf.end(source), self._shelf.end(to), self._models[source], self._models[to])
        return payload_bytes(Ends(self._run, source, to), layer.updates())


def weigh(edges: list[Edge], ideal: Ideal, behind: int, versions: int) -> CatchUp:
    """What followers fetch from each start, the folds that are there at their tip given.

    Objects are LATEST, the catalog, and of each hop its shard and the manifest at its end; a delta's is found from the
    nearest one above it that the catalog names, or from the tip's, over all in between.
    """
    ratios, hops, objects = [], [], []
    for tip in range(behind, versions + 1):
        start = tip - behind
        there = [edge for edge in edges if edge.source is not None and edge.to <= tip]
        way = quickest([edge for edge in there if edge.source is not None and edge.source >= start], start, tip)
        named = {tip, *(edge.to for edge in there if not _is_delta(edge))}
        manifests = {edge.to for edge in way}
        for edge in filter(_is_delta, way):
            manifests.update(range(edge.to, min(version for version in named if version >= edge.to) + 1))
        ratios.append(sum(edge.bytes for edge in way) / ideal.bytes(start, tip))
        hops.append(len(way))
        objects.append(2 + len(way) + len(manifests))
    return CatchUp(behind, len(ratios), max(ratios), float(np.mean(ratios)), max(hops), max(objects))


def _is_delta(edge: Edge) -> bool:
    return edge.source == edge.to - 1
