"""A pin brings every follower to its version, also backwards, and holds against a publisher that goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_folds
import tiny_log
from hooked_store import HookedStore

from tests.unit.log.replicas import assert_at
from vllm_delta_sync.errors import Unavailable, VersionGap
from vllm_delta_sync.log import DeltaLog, LogWriter, pinning, settling
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.retention import retain
from vllm_delta_sync.wire.catalog import Catalog

LOOKS = settling.LOOKS


def nothing(_: float) -> None:
    pass


def unconditional(tiny: tiny_log.TinyLog) -> DeltaLog:
    """The log as on a store that refuses no write of LATEST."""
    return DeltaLog(HookedStore(tiny.log.store, conditional=False), tiny.log.run)


def replica_at(tiny: tiny_log.TinyLog, version: int) -> Replica:
    replica = Replica(tiny.log, tiny.base)
    replica.go_to(tiny.log.latest(), version)
    return replica


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_every_follower_goes_to_the_pin_and_back_to_the_tip(tiny: tiny_log.TinyLog, version: int) -> None:
    replicas = [replica_at(tiny, at) for at in range(4)]
    before = tiny.log.latest()
    found = pinning.pin(tiny.log, version, tiny.base, sleep=nothing)
    pointer = tiny.log.latest()
    assert (pointer, pointer.pin, pointer.version) == (found.pointer, version, 3)
    assert pointer.sequence == before.sequence + 1, "pin and folds are one write"
    assert [fold.source for fold in found.folds] == [at for at in (3, 2) if at > version]
    for replica in replicas:
        replica.follow(pointer)
        assert_at(replica, tiny, version)
    unpinned = pinning.unpin(tiny.log, sleep=nothing)
    assert (unpinned.pin, unpinned.sequence) == (None, pointer.sequence + 1)
    for replica in replicas:
        replica.follow(unpinned)
        assert_at(replica, tiny, 3)


def test_a_pin_moves_further_back_and_forward(tiny: tiny_log.TinyLog) -> None:
    replica = replica_at(tiny, 3)
    for version in (2, 0, 1, 3):
        pinning.pin(tiny.log, version, tiny.base, sleep=nothing)
        kinds = []
        while (hop := replica.route.next_hop(tiny.log.latest(), replica.held, replica.version, version)) is not None:
            replica.apply(hop)
            kinds.append(hop.to)
        assert_at(replica, tiny, version)
        assert max(kinds) <= max(kinds[0], version), "never over a version that it left for a reason"


def test_the_same_pin_again_writes_nothing(tiny: tiny_log.TinyLog) -> None:
    pinning.pin(tiny.log, 1, tiny.base, sleep=nothing)
    keys, pointer = list(tiny.log.store.list()), tiny.log.latest()
    again = pinning.pin(tiny.log, 1, sleep=nothing)
    assert (again.folds, again.pointer) == ((), pointer)
    assert list(tiny.log.store.list()) == keys
    pinning.unpin(tiny.log, sleep=nothing)
    assert pinning.unpin(tiny.log, sleep=nothing).sequence == pointer.sequence + 1


def test_the_publisher_goes_on_under_a_pin_and_carries_it(tiny: tiny_log.TinyLog) -> None:
    pinning.pin(tiny.log, 1, tiny.base, sleep=nothing)
    for seed in (50, 51):
        tiny.publish(tiny_log.changed_model(tiny.models[-1], seed))
    pointer = tiny.log.latest()
    assert (pointer.version, pointer.pin) == (5, 1)
    replica = replica_at(tiny, 0)
    replica.follow(pointer)
    assert_at(replica, tiny, 1)
    pointer = pinning.unpin(tiny.log, sleep=nothing)
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 52))
    replica.follow(tiny.log.latest())
    assert_at(replica, tiny, 6)


def test_a_version_that_was_published_while_the_pin_was_made_is_led_back_from(tiny: tiny_log.TinyLog) -> None:
    seeds = iter(range(60, 100))

    def publish(*_: object) -> None:
        if len(tiny.models) < 6:
            tiny.publish(tiny_log.changed_model(tiny.models[-1], next(seeds)))

    # Once while folds are composed, and once after the pin is set: the last one no follower takes.
    found = pinning.pin(unconditional(tiny), 1, tiny.base, sleep=publish, progress=_once(publish))
    assert {fold.source for fold in found.folds} == {2, 3, 4}
    pointer = tiny.log.latest()
    assert (pointer.version, pointer.pin) == (5, 1)
    for at in (2, 3, 4):
        replica = replica_at(tiny, at)
        replica.follow(pointer)
        assert_at(replica, tiny, 1)
    assert pinning.missing(tiny.log.catalog(), 4, 1) == []


def _once(call: Callable[[], None]) -> Callable[[str, int, int], None]:
    calls = iter([call])

    def progress(what: str, done: int, total: int) -> None:
        for first in calls:
            first()
            break

    return progress


def test_a_pin_that_is_overwritten_is_set_again_and_one_that_never_lasts_is_reported(tiny: tiny_log.TinyLog) -> None:
    times = 0

    def overwrite(_: float) -> None:
        nonlocal times
        times += 1
        if times <= limit:
            lost = tiny.log.latest().model_copy(update={"pin": None})
            tiny.object("LATEST").write_bytes(lost.to_bytes())

    log, limit = unconditional(tiny), 2
    assert pinning.pin(log, 1, tiny.base, sleep=overwrite).pointer.pin == 1
    assert times == 2 + LOOKS, "twice at once, then it is looked at until nothing can come late"
    pinning.unpin(log, sleep=nothing)
    times, limit = 0, 1000
    with pytest.raises(Unavailable, match="did not last"):
        pinning.pin(log, 2, tiny.base, sleep=overwrite)


def test_an_unpin_that_is_overwritten_is_repeated_and_one_that_never_lasts_is_reported(tiny: tiny_log.TinyLog) -> None:
    log, limit, times = unconditional(tiny), 2, 0

    def overwrite(_: float) -> None:
        nonlocal times
        times += 1
        if times <= limit:
            back = tiny.log.latest().model_copy(update={"pin": 1})
            tiny.object("LATEST").write_bytes(back.to_bytes())

    pinning.pin(log, 1, tiny.base, sleep=nothing)
    assert pinning.unpin(log, sleep=overwrite).pin is None
    assert times == 2 + LOOKS
    pinning.pin(log, 1, tiny.base, sleep=nothing)
    times, limit = 0, 1000
    with pytest.raises(Unavailable, match="came back"):
        pinning.unpin(log, sleep=overwrite)


def test_versions_published_while_folds_are_composed_are_neither_lost_nor_stranded(tiny: tiny_log.TinyLog) -> None:
    def publish_two() -> None:
        for seed in (60, 61):
            tiny.publish(tiny_log.changed_model(tiny.models[-1], seed))

    pinning.pin(unconditional(tiny), 1, tiny.base, sleep=nothing, progress=_once(publish_two))
    pointer = tiny.log.latest()
    assert (pointer.version, pointer.pin) == (5, 1)
    for at in (3, 4, 5):
        replica = replica_at(tiny, at)
        replica.follow(pointer)
        assert_at(replica, tiny, 1)


def test_a_latest_that_our_own_late_write_took_back_is_taken_forward_again(tiny: tiny_log.TinyLog) -> None:
    log = unconditional(tiny)
    old = tiny.log.latest()
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 60))
    calls = 0

    def rewind(_: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            late = old.model_copy(update={"pin": 1, "catalog": tiny.log.latest().catalog})
            tiny.object("LATEST").write_bytes(late.to_bytes())

    found = pinning.pin(log, 1, tiny.base, sleep=rewind)
    assert (found.pointer.version, tiny.log.latest().version, found.pointer.pin) == (4, 4, 1)


def test_a_version_that_does_not_exist_cannot_be_pinned(tiny: tiny_log.TinyLog) -> None:
    before = tiny.object("LATEST").read_bytes()
    with pytest.raises(VersionGap, match="there is no version 4; the newest is 3"):
        pinning.pin(tiny.log, 4, sleep=nothing)
    assert tiny.object("LATEST").read_bytes() == before


def test_the_way_back_needs_no_base_when_all_changes_are_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("steps")
    tiny = tiny_log.build(directory, 1)
    model = {name: (spec, bits.copy()) for name, (spec, bits) in tiny.models[-1].items()}
    model["embed.weight"][1][3] ^= 1
    tiny.publish(model)
    tiny.base.rename(directory / "elsewhere")
    pinning.pin(tiny.log, 1, sleep=nothing)
    replica = Replica(tiny.log, directory / "elsewhere")
    replica.go_to(tiny.log.latest(), 2)
    replica.follow(tiny.log.latest())
    assert_at(replica, tiny, 1)


@pytest.mark.parametrize(
    ("folds", "anchors", "tip", "version", "pin", "found"),
    [
        ([], [], 5, 5, None, []),
        ([], [], 5, 4, None, [5]),
        ([], [], 5, 2, None, [5, 4]),
        ([(5, 2)], [], 5, 2, None, [4]),  # from 4 it leads over 5
        ([(4, 2)], [], 5, 2, None, [5]),
        ([(5, 3), (4, 2), (3, 2)], [], 5, 2, None, []),
        ([(5, 1)], [], 5, 2, None, [5, 4]),  # further back than it should
        ([], [2], 5, 2, None, []),
        ([], [3], 5, 2, None, [5, 4]),
        ([(5, 1), (4, 1)], [], 5, 1, 3, [3]),  # where the pin before held them
    ],
)
def test_where_no_way_leads_straight_back(
    folds: list[tuple[int, int]], anchors: list[int], tip: int, version: int, pin: int | None, found: list[int]
) -> None:
    catalog = Catalog(
        run=tiny_folds.RUN,
        folds=tuple(tiny_folds.stated_fold(*ends) for ends in folds),
        anchors=tuple(map(tiny_folds.stated_anchor, anchors)),
    )
    assert pinning.missing(catalog, tip, version, pin) == found


def test_folds_back_are_let_go_once_nothing_is_pinned(tiny: tiny_log.TinyLog) -> None:
    pinning.pin(tiny.log, 1, tiny.base, sleep=nothing)
    assert [fold.to for fold in tiny.log.catalog().folds] == [1, 1]
    left = retain(tiny.log.catalog(), 3, keep_versions=None, keep_anchors=2)
    assert left.folds == ()


def test_a_writer_that_resumes_under_a_pin_carries_it(tiny: tiny_log.TinyLog) -> None:
    pinning.pin(tiny.log, 2, tiny.base, sleep=nothing)
    tiny.writer = LogWriter.attach(DeltaLog.open(tiny.bucket))
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 70))
    assert tiny.log.latest().pin == 2
