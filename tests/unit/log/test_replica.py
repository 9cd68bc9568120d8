"""A replica goes to any version there is a way to, by deltas, folds and anchors, and is whole after any error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_folds
import tiny_log

from tests.unit.log.replicas import LENGTH, assert_at, hops, pinned
from vllm_delta_sync.errors import DigestMismatch, MalformedObject, NotFound, StateHashMismatch, VersionGap
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.export import export
from vllm_delta_sync.log.layers import Layer
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.log.tail import Tail
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.hop import Hop


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


def test_a_replica_whose_delta_cannot_be_kept_is_what_it_was(long: tiny_log.TinyLog) -> None:
    def keep(layer: Layer) -> None:
        raise MemoryError

    replica = Replica(long.log, long.base)
    with pytest.raises(MemoryError):
        replica.go_to(long.log.latest(), 1, keep=keep)
    assert_at(replica, long, 0)
