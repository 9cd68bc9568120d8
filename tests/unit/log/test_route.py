"""A follower takes the cheapest way of deltas, folds and anchors to any version, and goes around what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_folds
import tiny_log

from tests.unit.log.replicas import LENGTH, assert_at, hops
from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.hop import Hop


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
