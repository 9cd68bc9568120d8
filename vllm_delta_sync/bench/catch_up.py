"""What catching up costs over the folds of a schedule, beside one fold of the whole way, for every start there is.

Does not fetch anything: it weighs the objects of a log that it writes itself, of a synthetic walk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync.bench.codings import WITHOUT_BASE, payload_bytes, write_log
from vllm_delta_sync.bench.step import Model
from vllm_delta_sync.bench.warm_walk import DRIFT, WarmWalk
from vllm_delta_sync.log import DeltaLog, FoldSchedule
from vllm_delta_sync.log.folding import write_scheduled
from vllm_delta_sync.log.layers import between
from vllm_delta_sync.log.plan import Edge, plan
from vllm_delta_sync.log.shelf import Shelf
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.wire.checkpoint import write_checkpoint
from vllm_delta_sync.wire.shard import Ends


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A follower `behind` versions behind each possible tip."""

    behind: int  # versions
    starts: int  # how many were weighed
    worst: float  # bytes of the cheapest way over those of one fold of the whole way
    mean: float
    hops: int  # of the cheapest way, at most
    objects: int  # fetched at most: LATEST, the catalog, each fold's or delta's shard, and each delta's manifest


@dataclass(frozen=True, slots=True)
class Report:
    """What a schedule costs and gives."""

    changed: float  # share of the elements, per version
    delta_bytes: float  # per version
    fold_bytes: float  # per version
    ways: tuple[CatchUp, ...]


def measure(
    directory: Path,
    schedule: FoldSchedule,
    *,
    elements: int,
    versions: int,
    behind: Iterable[int],
    drift: float = DRIFT,
) -> Report:
    """Write a walk of that many versions into an empty directory, fold it, and weigh the ways to catch up."""
    models = list(WarmWalk(elements, drift=drift).models(versions))
    log = write(open_store(os.fspath(directory / "bucket")), directory / "base", models)
    write_scheduled(log, schedule, 1)
    manifests = log.manifests()
    folds = log.catalog().folds
    edges = [Edge(fold.source, fold.to, fold.totals.bytes) for fold in folds]
    edges += [Edge(one.version - 1, one.version, one.totals.bytes) for one in manifests[1:]]
    ideal = Ideal(log, models)
    return Report(
        changed=float(np.mean([one.totals.changed / one.totals.elements for one in manifests[1:]])),
        delta_bytes=float(np.mean([one.totals.bytes for one in manifests[1:]])),
        fold_bytes=sum(fold.totals.bytes for fold in folds) / versions,
        ways=tuple(weigh(edges, ideal, distance, versions) for distance in behind),
    )


def write(store: Store, base: Path, models: list[Model]) -> DeltaLog:
    """A log of these models, without folds, whose base is written to the directory `base`."""
    write_checkpoint(base, models[0].values())
    return write_log(store, base, models, WITHOUT_BASE).log


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
    ratios, hops, objects = [], [], []
    for tip in range(behind, versions + 1):
        start = tip - behind
        within = [edge for edge in edges if edge.source is not None and edge.source >= start and edge.to <= tip]
        way = plan(within, start, tip)
        ratios.append(sum(edge.bytes for edge in way) / ideal.bytes(start, tip))
        hops.append(len(way))
        objects.append(2 + len(way) + sum(edge.source == edge.to - 1 for edge in way))
    return CatchUp(behind, len(ratios), max(ratios), float(np.mean(ratios)), max(hops), max(objects))
