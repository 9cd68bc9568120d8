"""A follower far behind catches up for little more than one fold of its whole way, wherever it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from vllm_delta_sync.bench import catch_up
from vllm_delta_sync.bench.codings import CODINGS
from vllm_delta_sync.bench.warm_walk import Model, WarmWalk, specs
from vllm_delta_sync.errors import NotFound
from vllm_delta_sync.log import DeltaLog, FoldSchedule
from vllm_delta_sync.log.amend import amend
from vllm_delta_sync.log.anchoring import with_anchors, write_anchor
from vllm_delta_sync.log.collection import collect
from vllm_delta_sync.log.folding import write_fold, write_scheduled
from vllm_delta_sync.log.plan import Edge, quickest
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.store import Content, ObjectInfo
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.hop import Hop

VERSIONS, BEHIND = 112, 100


class MemoryStore:
    """Objects in a dictionary, and how many bytes of each were read."""

    uri, conditional, metered = "memory:", True, False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.read: dict[str, int] = {}

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        assert not (create and key in self.objects), f"{key} is taken"
        assert over is None or self.head(key).tag == over, f"{key} was replaced"
        self.objects[key] = bytes(data)
        return self.head(key)

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        data = self.objects[key][start:end]
        self.read[key] = self.read.get(key, 0) + len(data)
        return data

    def head(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise NotFound(key)
        return ObjectInfo(len(self.objects[key]), str(hash(self.objects[key])))

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def modified(self, keys: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(keys, 0.0)


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return list(WarmWalk(480_000).models(VERSIONS))


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="module")
def log(store: MemoryStore, models: list[Model], tmp_path_factory: pytest.TempPathFactory) -> DeltaLog:
    """A walk with the folds of the schedule that publishers keep by default."""
    found = catch_up.write(store, tmp_path_factory.mktemp("walk"), models)
    write_scheduled(found, FoldSchedule())
    return found


def assert_at(replica: Replica, models: list[Model], version: int) -> None:
    assert replica.version == version
    for name, (_, bits) in models[version].items():
        np.testing.assert_array_equal(replica.tensors[name][1], bits)


@pytest.mark.parametrize("elements", [480_000, 850_000, 1_300_000, 12_000_000])
def test_the_walk_has_about_as_many_elements_as_are_asked_for(elements: int) -> None:
    assert abs(sum(spec.numel for spec in specs(elements)) / elements - 1) < 0.05


def test_the_walk_changes_as_much_as_a_long_run_does(log: DeltaLog) -> None:
    shares = [one.totals.changed / one.totals.elements for one in log.manifests()[1:]]
    assert 0.006 < np.mean(shares) < 0.011


def test_every_start_100_versions_behind_is_within_1_4_of_one_fold_and_12_objects(
    log: DeltaLog, models: list[Model]
) -> None:
    ideal = catch_up.Ideal(log, models)
    folds = [Edge(fold.source, fold.to, fold.totals.bytes) for fold in log.catalog().folds]
    edges = folds + [Edge(one.version - 1, one.version, one.totals.bytes) for one in log.manifests()[1:]]
    way = catch_up.weigh(edges, ideal, BEHIND, VERSIONS)
    assert way.starts == VERSIONS - BEHIND + 1
    assert way.worst <= 1.4
    assert way.objects <= 12
    bare = catch_up.weigh(edges[len(folds) :], ideal, BEHIND, BEHIND)
    assert bare.worst > 4  # so there is something to win


@pytest.mark.parametrize("start", range(VERSIONS - BEHIND + 1))
def test_a_follower_fetches_what_the_quickest_way_takes_and_no_more(
    store: MemoryStore, log: DeltaLog, models: list[Model], start: int
) -> None:
    goal = start + BEHIND
    replica = Replica(log, models[0])
    replica.go_to(log.latest(), start)
    manifest = replica.route.reference(log.latest(), goal)
    replica.route = Route(log)  # it comes back after a long time, and remembers nothing of the log
    store.read.clear()
    replica.follow(log.latest().model_copy(update={"version": goal, "manifest": manifest}))
    read = dict(store.read)
    assert_at(replica, models, goal)
    edges = [Edge(fold.source, fold.to, fold.totals.bytes) for fold in log.catalog().folds]
    edges += [Edge(one.version - 1, one.version, one.totals.bytes) for one in log.manifests()[1:]]
    planned = sum(edge.bytes for edge in quickest([edge for edge in edges if edge.to <= goal], start, goal))
    shards = sum(size for key, size in read.items() if key.endswith(".safetensors"))
    assert shards <= 1.1 * planned
    assert len(read) <= 12


def test_who_is_one_version_behind_asks_for_no_catalog(store: MemoryStore, log: DeltaLog, models: list[Model]) -> None:
    replica = Replica(log, models[0])
    replica.go_to(log.latest(), VERSIONS - 1)
    replica.route = Route(log)
    store.read.clear()
    replica.follow(log.latest())
    assert_at(replica, models, VERSIONS)
    assert sorted(key.split("/")[1] for key in store.read) == ["LATEST", "versions", "versions"]


def test_a_way_back_is_composed_without_the_base_where_nothing_is_coded_against_it(
    tmp_path: Path, models: list[Model]
) -> None:
    log = catch_up.write(MemoryStore(), tmp_path, models[:11], CODINGS["gap"])
    fold = write_fold(log, 10, 1, {})  # in which no tensor could be found, were it asked
    replica = Replica(log)
    replica.go_to(log.latest(), 10)
    replica.apply(Hop.over(fold, fold.manifest))
    assert_at(replica, models, 1)


def test_who_was_away_past_retention_recovers_by_anchor(tmp_path: Path, models: list[Model]) -> None:
    log = catch_up.write(MemoryStore(), tmp_path, models[:31])
    anchor = write_anchor(log, 25)
    amend(log, lambda catalog, _: with_anchors(catalog, [anchor]))
    away = Replica(log)
    away.go_to(log.latest(), 3)
    write_scheduled(log, FoldSchedule(base=2, levels=2, reach=0))
    assert collect(log, keep_versions=4, grace=0, delete=True).deleted > 0
    assert log.catalog().oldest > 3
    hop = away.route.next_hop(log.latest(), away.held, away.version, 30)
    assert hop is not None and hop.kind == "anchor"
    away.follow(log.latest())
    assert_at(away, models, 30)
