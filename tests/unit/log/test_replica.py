"""A replica goes to any version there is a way to, by deltas, folds and anchors, and is whole after any error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tiny_folds
import tiny_log
from counting_store import CountingStore

from vllm_delta_sync.errors import DigestMismatch, MalformedObject, NotFound, StateHashMismatch, VersionGap
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.export import export
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.log.states import locate, states
from vllm_delta_sync.log.tail import Tail, TipWatch
from vllm_delta_sync.store import Content, ObjectInfo, Store
from vllm_delta_sync.wire import frames, state_hash
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.hop import Hop

LENGTH = 6


@pytest.fixture(scope="module")
def long_template(tmp_path_factory: pytest.TempPathFactory) -> tiny_log.TinyLog:
    """Six versions with the folds 0→4, 2→4 and 6→3 and an anchor at 4."""
    tiny = tiny_log.build(tmp_path_factory.mktemp("long"), LENGTH)
    for source, to in ((0, 4), (2, 4), (6, 3)):
        tiny_folds.add_fold(tiny, source, to)
    tiny_folds.add_anchor(tiny, 4)
    return tiny


@pytest.fixture
def long(long_template: tiny_log.TinyLog, tmp_path: Path) -> tiny_log.TinyLog:
    return tiny_log.copy(long_template, tmp_path)


def assert_at(replica: Replica, tiny: tiny_log.TinyLog, version: int) -> None:
    assert replica.version == version
    assert replica.held.sha256 == tiny_folds.reference(tiny, version).sha256
    model = tiny.models[version]
    assert replica.root == state_hash.state_root(tiny_log.lanes_of(model))
    assert tiny_log.same(replica.tensors, model)
    for spec, bits in model.values():
        np.testing.assert_array_equal(replica.lanes[spec], state_hash.of_tensor(spec, bits))


def pinned(tiny: tiny_log.TinyLog, version: int) -> tiny_log.TinyLog:
    pointer = tiny.log.latest()
    changed = pointer.model_copy(update={"pin": version, "sequence": pointer.sequence + 1})
    tiny.object("LATEST").write_bytes(changed.to_bytes())
    return tiny


def hops(tiny: tiny_log.TinyLog, start: int, goal: int) -> list[tuple[str, int]]:
    """The way a follower takes, hop by hop."""
    log = tiny.log
    route, pointer, held, at, found = Route(log), log.latest(), tiny_folds.reference(tiny, start), start, []
    while (hop := route.next_hop(pointer, held, at, goal)) is not None:
        held, at = hop.target, hop.to
        found.append((hop.kind, hop.to))
    return found


@pytest.mark.parametrize(
    ("start", "goal", "way"),
    [
        (0, 6, [("fold", 4), ("delta", 5), ("delta", 6)]),
        (1, 6, [("delta", 2), ("fold", 4), ("delta", 5), ("delta", 6)]),
        (0, 3, [("delta", 1), ("delta", 2), ("delta", 3)]),  # 4 is beyond the goal, though 0→4→… may be cheap
        (5, 5, []),
        (6, 3, [("fold", 3)]),
        (6, 4, [("anchor", 4)]),  # a fold to 3 would go back further than asked
        (5, 3, [("delta", 6), ("fold", 3)]),  # the only way back is over the tip
    ],
)
def test_the_way_of_a_follower(
    long_template: tiny_log.TinyLog, start: int, goal: int, way: list[tuple[str, int]]
) -> None:
    assert hops(long_template, start, goal) == way


def test_a_way_back_never_leads_over_a_version_older_than_its_goal(long_template: tiny_log.TinyLog) -> None:
    with pytest.raises(VersionGap, match="no way from version 6 to version 5"):
        hops(long_template, 6, 5)


def test_who_holds_nothing_begins_at_an_anchor(long_template: tiny_log.TinyLog) -> None:
    log = long_template.log
    hop = Route(log).next_hop(log.latest(), None, None, 6)
    assert hop is not None
    assert (hop.kind, hop.to, hop.step) == ("anchor", 4, 40)
    with pytest.raises(VersionGap, match="no way from nothing to version 3"):
        Route(log).next_hop(log.latest(), None, None, 3)


def test_who_holds_nothing_begins_at_the_anchor_of_version_0_where_there_is_no_other(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 2, anchor=True)
    log = tiny.log
    hop = Route(log).next_hop(log.latest(), None, None, 2)
    assert hop is not None
    assert (hop.kind, hop.to, hop.states) == ("anchor", 0, None)
    replica = Replica(log)
    replica.follow(log.latest())
    replica.apply(hop)
    assert_at(replica, tiny, 0)


def test_hops_survive_the_journey_through_a_message(long_template: tiny_log.TinyLog) -> None:
    log = long_template.log
    for start in (0, 5, 6):
        hop = Route(log).next_hop(log.latest(), tiny_folds.reference(long_template, start), start, 3)
        assert hop is not None
        assert Hop.from_bytes(hop.to_bytes(), "message") == hop


@pytest.mark.parametrize("goal", range(LENGTH + 1))
def test_a_replica_reaches_every_version_and_comes_back_by_a_pin(long: tiny_log.TinyLog, goal: int) -> None:
    replica = Replica(long.log, long.base)
    assert_at(replica, long, 0)
    replica.go_to(long.log.latest(), goal)
    assert_at(replica, long, goal)
    replica.follow(long.log.latest())
    assert_at(replica, long, LENGTH)
    if goal in (3, 4, 6):
        replica.follow(pinned(long, goal).log.latest())
        assert_at(replica, long, goal)


def test_materialise_and_export_take_folds_and_anchors_when_deltas_and_base_are_gone(
    long: tiny_log.TinyLog, tmp_path: Path
) -> None:
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 4}))
    for version in (1, 2, 3, 4):
        for shard in DeltaLog.open(long.bucket).manifest(tiny_folds.reference(long, version)).shards:
            long.object(shard.key).unlink()
    for base in (long.base, None):
        for version in (4, 5, 6):
            found = long.log.materialize(version, base)
            for name, (_, bits) in long.models[version].items():
                np.testing.assert_array_equal(found[name][1], bits)
    for file in (long.base / "config.json", long.base / "model.safetensors"):
        file.unlink()
    export(long.log, 5, tmp_path / "out")
    for name, (_, bits) in long.models[5].items():
        np.testing.assert_array_equal(open_checkpoint(tmp_path / "out")[name][1], bits)


def test_version_0_costs_nothing_when_it_is_at_hand_and_an_anchor_is_taken_only_when_it_is_cheaper(
    long_template: tiny_log.TinyLog,
) -> None:
    log = long_template.log
    pointer = log.latest()
    assert Route(log).start(pointer, 0, 6) is None
    far = Route(log).start(pointer, 1 << 40, 6)
    assert far is not None
    assert (far.kind, far.to) == ("anchor", 4)
    assert Route(log).start(pointer, 1 << 40, 2) is None


def _shard_of(tiny: tiny_log.TinyLog, hop: Hop) -> Path:
    return tiny.object(hop.shards[0].key if hop.checkpoint is None else hop.checkpoint.files[0].key)


def _lie_about_the_end(hop: Hop) -> Hop:
    return hop.model_copy(update={"after": "0" * 64})


@pytest.mark.parametrize("start", [0, 4, 6], ids=["fold", "delta", "fold back"])
def test_a_hop_that_fails_leaves_the_replica_as_it_was(long: tiny_log.TinyLog, start: int) -> None:
    replica, pointer = Replica(long.log, long.base), long.log.latest()
    replica.go_to(pointer, start)
    hop = replica.route.next_hop(pointer, replica.held, start, 3 if start == 6 else 6)
    assert hop is not None
    with pytest.raises(StateHashMismatch, match="comes to state root"):
        replica.apply(_lie_about_the_end(hop))
    assert_at(replica, long, start)
    tiny_log.damage(_shard_of(long, hop))
    with pytest.raises(DigestMismatch):
        replica.apply(hop)
    assert_at(replica, long, start)
    _shard_of(long, hop).unlink()
    with pytest.raises(NotFound):
        replica.apply(hop)
    assert_at(replica, long, start)


def test_a_damaged_anchor_leaves_the_replica_as_it_was(long: tiny_log.TinyLog) -> None:
    replica = Replica(long.log, long.base)
    hop = replica.route.next_hop(long.log.latest(), None, None, 4)
    assert hop is not None
    tiny_log.damage(_shard_of(long, hop))
    with pytest.raises(DigestMismatch):
        replica.apply(hop)
    assert_at(replica, long, 0)


def test_a_hop_that_begins_elsewhere_is_refused(long: tiny_log.TinyLog) -> None:
    replica, pointer = Replica(long.log, long.base), long.log.latest()
    delta = replica.route.next_hop(pointer, tiny_folds.reference(long, 4), 4, 6)
    fold = replica.route.next_hop(pointer, replica.held, 0, 6)
    assert delta is not None
    assert fold is not None
    with pytest.raises(VersionGap, match="does not begin at the version 0 that is held"):
        replica.apply(delta)
    with pytest.raises(StateHashMismatch, match="begins at state root 00"):
        replica.apply(fold.model_copy(update={"before": "0" * 64}))
    assert_at(replica, long, 0)


def test_a_follower_goes_around_a_damaged_or_missing_fold(long: tiny_log.TinyLog) -> None:
    for break_it in (tiny_log.damage, Path.unlink):
        replica, pointer = Replica(long.log, long.base), long.log.latest()
        hop = replica.route.next_hop(pointer, replica.held, 0, 6)
        assert hop is not None
        assert hop.kind == "fold"
        break_it(_shard_of(long, hop))
        replica.follow(pointer)
        assert_at(replica, long, LENGTH)


def test_a_follower_goes_around_a_fold_whose_target_is_gone(long: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(long, 1, 3)
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 3}))
    held = tiny_folds.reference(long, 1)
    long.object(tiny_folds.reference(long, 3).key).unlink()
    hop = Route(long.log).next_hop(long.log.latest(), held, 1, 6)
    assert hop is not None
    assert (hop.kind, hop.to) == ("anchor", 4)


def test_a_manifest_is_found_from_the_tip_when_the_nearest_that_is_named_is_not_of_the_branch(
    long: tiny_log.TinyLog,
) -> None:
    held = tiny_folds.reference(long, 2)

    def lie(catalog: Catalog) -> Catalog:
        away = catalog.folds[0].manifest.model_copy(update={"sha256": "0" * 64})
        return catalog.model_copy(
            update={"folds": (catalog.folds[0].model_copy(update={"to": 3, "manifest": away}),), "anchors": ()}
        )

    long.writer.put_catalog(lie)
    hop = Route(long.log).next_hop(long.log.latest(), held, 2, 6)
    assert hop is not None
    assert (hop.kind, hop.to) == ("delta", 3)


def test_a_follower_around_which_nothing_leads_says_what_is_missing_and_stays(long: tiny_log.TinyLog) -> None:
    replica, pointer = Replica(long.log, long.base), long.log.latest()
    replica.go_to(pointer, 5)
    tip = long.log.tip()
    long.object(tip.shards[0].key).unlink()
    with pytest.raises(NotFound, match=tip.shards[0].key):
        replica.follow(pointer)
    assert_at(replica, long, 5)


def test_a_fold_that_lies_about_its_target_is_refused_by_name(
    long: tiny_log.TinyLog, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(catalog: Catalog) -> Catalog:
        first, *rest = catalog.folds
        return catalog.model_copy(update={"folds": (first.model_copy(update={"after": "1" * 64}), *rest)})

    long.writer.put_catalog(lie)
    assert hops(long, 0, 6)[0] == ("delta", 1), "there is another way"
    assert "the catalog's fold to version 4 ends at state root 11" in caplog.text
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 4, "anchors": ()}))
    with pytest.raises(MalformedObject, match="the catalog's fold to version 4 ends at state root 11"):
        hops(long, 0, 6)


def test_another_branch_is_not_followed_and_an_anchor_leads_onto_it(long: tiny_log.TinyLog, tmp_path: Path) -> None:
    other = tiny_log.copy(long, tmp_path / "other")
    other.publish(tiny_log.changed_model(other.models[-1], 70))
    held = tiny_folds.reference(other, 7)
    long.publish(tiny_log.changed_model(long.models[-1], 71))
    with pytest.raises(VersionGap, match="not of the branch that LATEST"):
        Route(long.log).next_hop(long.log.latest(), held, 7, 7)
    long.publish(tiny_log.changed_model(long.models[-1], 72))
    with pytest.raises(VersionGap, match="not of the branch that LATEST"):
        Route(long.log).next_hop(long.log.latest(), held, 7, 8)
    tiny_folds.add_fold(long, 7, 8)
    with pytest.raises(VersionGap, match="not of the branch that LATEST"):
        Route(long.log).next_hop(long.log.latest(), held, 7, 8)
    tiny_folds.add_anchor(long, 8)
    hop = Route(long.log).next_hop(long.log.latest(), held, 7, 8)
    assert hop is not None
    assert (hop.kind, hop.to) == ("anchor", 8)


def test_a_latest_that_goes_back_without_a_pin_is_not_followed(long: tiny_log.TinyLog) -> None:
    tail, replica = Tail(long.log), Replica(long.log, long.base)
    tail.look()
    replica.follow(long.log.latest())
    back = {"version": 4, "manifest": tiny_folds.reference(long, 4)}
    long.object("LATEST").write_bytes(long.log.latest().model_copy(update=back).to_bytes())
    for _ in range(2):
        with pytest.raises(VersionGap, match="went back from version 6 to 4"):
            tail.look()
        with pytest.raises(VersionGap, match="went back from version 6 to 4"):
            replica.follow(long.log.latest())
    assert (tail.version, replica.version) == (LENGTH, LENGTH)
    with pytest.raises(VersionGap, match="there is no version 6; the newest is 4"):
        tiny_folds.reference(long, LENGTH)


def test_a_pin_is_reached_also_when_the_manifest_of_the_tip_is_damaged(long: tiny_log.TinyLog) -> None:
    replicas = [Replica(long.log, long.base) for _ in range(3)]
    for at, replica in zip((2, 5, 6), replicas, strict=True):
        replica.go_to(long.log.latest(), at)
        replica.route = Route(long.log)  # with nothing remembered
    tiny_folds.add_fold(long, 5, 3)
    tiny_log.damage(long.object(long.log.latest().manifest.key))
    pointer = pinned(long, 3).log.latest()
    for replica in replicas:
        replica.follow(pointer)
        assert replica.version == 3


def test_a_route_forgets_the_oldest_of_what_it_keeps_of_many_manifests(
    long: tiny_log.TinyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_delta_sync.log.branch.KEPT_LINKS", 2)
    monkeypatch.setattr("vllm_delta_sync.log.branch.KEPT_MANIFESTS", 3)
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"folds": (), "anchors": ()}))
    replica = Replica(long.log, long.base)
    for version in range(1, LENGTH + 1):
        replica.go_to(long.log.latest(), version)
    for seed in range(90, 96):
        long.publish(tiny_log.changed_model(long.models[-1], seed))
        replica.follow(long.log.latest())
    assert_at(replica, long, LENGTH + 6)


def test_deltas_that_may_be_gone_are_not_planned_with(long: tiny_log.TinyLog) -> None:
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 5, "folds": (), "anchors": ()}))
    with pytest.raises(
        VersionGap,
        match="no way from version 3 to version 6 over deltas, folds and anchors: nothing leads on from there",
    ):
        hops(long, 3, 6)
    assert hops(long, 5, 6) == [("delta", 6)]


class _Counting:
    """A store that notes which keys are asked for."""

    conditional = True
    metered = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        self.asked: list[tuple[str, str]] = []
        self.heads = 0

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        self.asked.append(("get", key.rsplit("/", 1)[-1].partition(".")[2] or key))
        return self._store.get(key, start, end, content=content)

    def head(self, key: str) -> ObjectInfo:
        self.asked.append(("head", key))
        return self._store.head(key)


def test_a_follower_that_is_in_step_asks_once_and_then_for_one_manifest_a_version(long: tiny_log.TinyLog) -> None:
    store = _Counting(long.log.store)
    tail = Tail(DeltaLog(store, long.log.run))  # type: ignore[arg-type]
    assert tail.look() == []
    assert tail.version == LENGTH
    store.asked.clear()
    assert tail.look() == []
    assert store.asked == [("head", "LATEST")]
    store.asked.clear()
    long.publish(tiny_log.changed_model(long.models[-1], 80))
    (hop,) = tail.look()
    assert (hop.kind, hop.to, tail.version) == ("delta", 7, 7)
    assert tail.fetched == hop.bytes
    # The table is in the shard; the catalog is known.
    assert store.asked == [
        ("head", "LATEST"),
        ("get", "LATEST"),
        ("get", "manifest.json"),
        ("get", "safetensors"),
    ]


def test_a_tail_from_the_base_takes_the_way_of_a_follower_and_verifies_it(long: tiny_log.TinyLog) -> None:
    tail = Tail(long.log, from_base=True)
    assert [(hop.kind, hop.to) for hop in tail.look()] == [("fold", 4), ("delta", 5), ("delta", 6)]
    long.publish(tiny_log.changed_model(long.models[-1], 81))
    path = long.object(long.log.tip().shards[0].key)
    whole = path.read_bytes()
    tiny_log.damage(path)
    with pytest.raises(DigestMismatch):
        tail.look()
    assert tail.version == LENGTH
    path.write_bytes(whole)
    assert [hop.to for hop in tail.look()] == [7]


def test_a_tail_reads_the_streams_of_what_it_fetches(long: tiny_log.TinyLog) -> None:
    update = tiny_log.updates_between(long.models[0], long.models[1])[0]
    start, count, block = update.blocks[0]
    endless = dataclasses.replace(block, index=frames.compress(b"\xff" * block.raw[0]))  # no gap in it ever ends
    long.writer.commit(
        [dataclasses.replace(update, blocks=[(start, count, endless)])], state_root=long.log.tip().state_root
    )
    with pytest.raises(MalformedObject, match=r"embed\.weight"):
        Tail(long.log, from_base=True).look()


def test_a_watch_tells_of_each_change_of_latest_once(long: tiny_log.TinyLog) -> None:
    watch = TipWatch(long.log)
    first = watch.look()
    assert first is not None
    assert watch.look() is None
    pinned(long, 5)
    second = watch.look()
    assert second is not None
    assert (second.pin, second.version) == (5, first.version)
    assert watch.look() is None


def _in_order(model: tiny_log.Model, tiny: tiny_log.TinyLog) -> np.ndarray:  # type: ignore[type-arg]
    lanes = tiny_log.lanes_of(model)
    return np.array([lanes[spec] for spec in tiny.log.base_table().tensors], np.uint32)


def test_the_states_of_a_run_come_cheapest_first_and_are_those_of_the_models(long: tiny_log.TinyLog) -> None:
    found = list(states(long.log, long.log.latest(), long.log.base_table()))
    assert [place.version for place in found] == [0, 4, 1, 2, 3, 5, 6]
    for place in found:
        np.testing.assert_array_equal(place.lanes, _in_order(long.models[place.version], long))
        assert place.ref.sha256 == tiny_folds.reference(long, place.version).sha256
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 4}))
    for version in (1, 2, 3):
        long.object(tiny_folds.reference(long, version).key).unlink()
    assert [place.version for place in states(long.log, long.log.latest(), long.log.base_table())] == [0, 4, 5, 6]
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"anchors": ()}))  # now by the fold to 4
    assert [place.version for place in states(long.log, long.log.latest(), long.log.base_table())] == [0, 5, 6]


@pytest.mark.parametrize("version", range(LENGTH + 1))
@pytest.mark.parametrize("whole", [True, False], ids=["by state root", "by lanes"])
def test_a_model_finds_its_version_by_content(long_template: tiny_log.TinyLog, version: int, whole: bool) -> None:
    tiny = long_template
    base = tiny.log.base_table()
    judged = np.full(len(base.tensors), True)
    judged[1] = whole
    lanes = _in_order(tiny.models[version], tiny)
    given = lanes.copy()
    given[~judged] = 0
    place = locate(tiny.log, tiny.log.latest(), base, given, judged)
    assert place is not None
    assert (place.version, place.root) == (version, state_hash.state_root(tiny_log.lanes_of(tiny.models[version])))
    assert place.ref.sha256 == tiny_folds.reference(tiny, version).sha256
    np.testing.assert_array_equal(place.lanes, lanes)
    given[2, 3] ^= 1
    assert locate(tiny.log, tiny.log.latest(), base, given, judged) is None


@pytest.mark.parametrize("whole", [True, False], ids=["by state root", "by lanes"])
@pytest.mark.parametrize(
    ("entries", "version", "is_found"),
    [(True, 6, True), (True, 5, True), (True, 4, True), (True, 2, False), (False, 2, False), (False, 0, True)],
)
def test_only_the_newest_of_many_versions_are_looked_through_one_by_one(
    long: tiny_log.TinyLog, monkeypatch: pytest.MonkeyPatch, entries: bool, version: int, is_found: bool, whole: bool
) -> None:
    monkeypatch.setattr("vllm_delta_sync.log.states.NEWEST", 2)
    if not entries:
        long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"folds": (), "anchors": ()}))
    store = CountingStore(long.log.store)
    log = DeltaLog(store, long.log.run)
    base, pointer = log.base_table(), log.latest()
    judged = np.full(len(base.tensors), True)
    judged[1] = whole
    store.gets.clear()
    place = locate(log, pointer, base, _in_order(long.models[version], long), judged)
    assert (place is not None and place.version == version) == is_found
    far = [key for key, _, _ in store.gets if key.startswith("versions/") and int(key.split("/")[1]) in (1, 2, 3)]
    assert not far


def test_a_replica_holds_no_more_than_model_and_delta(long: tiny_log.TinyLog) -> None:
    replica = Replica(long.log, long.base)
    before = {name: bits for name, (_, bits) in replica.tensors.items()}
    replica.follow(long.log.latest())
    unchanged = [name for name in before if np.array_equal(long.models[0][name][1], long.models[LENGTH][name][1])]
    assert unchanged
    assert all(replica.tensors[name][1] is before[name] for name in unchanged)


def test_a_reader_of_a_log_that_another_writer_continues_sees_its_versions(long: tiny_log.TinyLog) -> None:
    replica = Replica(long.log, long.base)
    replica.follow(long.log.latest())
    long.writer = LogWriter.attach(long.log)
    long.publish(tiny_log.changed_model(long.models[-1], 90))
    replica.follow(long.log.latest())
    assert_at(replica, long, LENGTH + 1)
