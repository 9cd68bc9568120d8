"""Behind its versions a publisher writes folds and anchors, and none of it gets in the way of publishing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_training
from hooked_store import HookedStore
from tiny_training import Training, TroubledStore

from vllm_delta_sync.log import DeltaLog, FoldSchedule, compose, folder
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.compose import Held
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.store import open_store
from vllm_delta_sync.trainer import Publisher, encode
from vllm_delta_sync.wire.catalog import Catalog

SCHEDULE = FoldSchedule(base=2, levels=3, reach=8, stride=3)


def published(store: object, training: Training, versions: int, **options: object) -> list[tiny_training.State]:
    """Publish that many versions; returns the state at each, version 0 first."""
    states = [training.state()]
    with Publisher.open(store, training.model, anchors=None, folds=SCHEDULE, **options) as publisher:  # type: ignore[arg-type]
        for _ in range(versions):
            training.step()
            publisher.publish(training.model)
            states.append(training.state())
    return states


def bytes_of(replica: Replica) -> tiny_training.State:
    return {name: bits.tobytes() for name, (_, bits) in replica.tensors.items()}


def test_a_publisher_writes_the_folds_of_its_schedule_and_each_leads_to_its_version(tmp_path: Path) -> None:
    states = published(str(tmp_path), Training(), 9)
    log = DeltaLog.open(str(tmp_path))
    folds = {(fold.source, fold.to): fold for fold in log.catalog().folds}
    assert set(folds) == {(to - length, to) for to in range(1, 10) for length in SCHEDULE.lengths(to)}
    for start in range(9):
        replica = Replica(log)
        replica.go_to(log.latest(), start)
        replica.go_to(log.latest(), 9)
        assert bytes_of(replica) == states[9]
    assert checks.verify(log).faults == ()


def test_a_resumed_publisher_folds_versions_that_it_has_to_read_back(tmp_path: Path) -> None:
    training = Training()
    published(str(tmp_path), training, 5)
    states = published(str(tmp_path), training, 3, resume=True)
    log = DeltaLog.open(str(tmp_path))
    assert {(0, 8), (4, 8), (6, 8)} <= {(fold.source, fold.to) for fold in log.catalog().folds}
    replica = Replica(log)
    replica.follow(log.latest())
    assert replica.route.next_hop(log.latest(), log.latest().base, 0, 8).kind == "fold"  # type: ignore[union-attr]
    assert bytes_of(replica) == states[-1]


def test_a_fold_that_fails_is_logged_and_the_next_ones_do_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = TroubledStore(open_store(str(tmp_path)))
    store.fail = lambda key: "folds/" in key and f"{2:020d}-{4:020d}" in key
    with caplog.at_level(logging.WARNING):
        states = published(store, Training(), 8)
    assert "no fold from version 2 to 4" in caplog.text
    log = DeltaLog.open(str(tmp_path))
    folds = {(fold.source, fold.to) for fold in log.catalog().folds}
    assert (2, 4) not in folds
    assert {(0, 4), (0, 8)} <= folds
    assert tiny_training.logged(open_store(str(tmp_path))) == states[-1]


def test_a_version_whose_changes_cannot_be_kept_for_folds_is_durable_nonetheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = iter((True, False))

    def hold(*block: object) -> Held:
        if not next(room, True):
            raise MemoryError
        return compose.hold(*block)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "hold", hold)
    states = published(str(tmp_path), Training(), 4)
    assert "cannot be folded from memory" in caplog.text
    assert checks.verify(DeltaLog.open(str(tmp_path))).faults == ()
    assert tiny_training.logged(open_store(str(tmp_path))) == states[-1]


def folds_of(log: DeltaLog) -> set[tuple[int, int]]:
    return {(fold.source, fold.to) for fold in log.catalog().folds}


def test_where_requests_count_a_catalog_goes_with_the_next_version_and_at_last_alone(tmp_path: Path) -> None:
    training, store = Training(), HookedStore(open_store(str(tmp_path)), metered=True)
    schedule = FoldSchedule(base=2, levels=1, reach=0)
    with Publisher.open(store, training.model, anchors=None, folds=schedule) as publisher:
        log = DeltaLog.open(str(tmp_path))
        begun = log.latest().sequence
        for version in range(1, 6):
            training.step()
            publisher.publish(training.model)
            publisher.wait()
            if version % 2 == 0:  # its fold is there before the next version comes
                wait_until(lambda version=version: len([*log.store.list("catalogs/")]) == version // 2)
            assert log.latest().sequence == begun + version, "one write of LATEST for each version"
        assert folds_of(log) == {(0, 2), (2, 4)}
        training.step()
        publisher.publish(training.model)
    assert folds_of(log) == {(0, 2), (2, 4), (4, 6)}
    assert checks.verify(log).faults == ()


def test_a_catalog_that_waits_for_a_version_in_vain_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "PATIENCE_S", 0.05)
    training, store = Training(), HookedStore(open_store(str(tmp_path)), metered=True)
    schedule = FoldSchedule(base=2, levels=1, reach=0)
    with Publisher.open(store, training.model, anchors=None, folds=schedule) as publisher:
        for _ in range(2):
            training.step()
            publisher.publish(training.model)
        wait_until(lambda: folds_of(DeltaLog.open(str(tmp_path))) == {(0, 2)})


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_catalog_that_cannot_be_written_keeps_no_version_back(tmp_path: Path) -> None:
    store = TroubledStore(open_store(str(tmp_path)))
    store.fail = lambda key: "catalogs/" in key
    states = published(store, Training(), 4)
    log = DeltaLog.open(str(tmp_path))
    assert log.latest().catalog is None
    assert tiny_training.logged(open_store(str(tmp_path))) == states[-1]


def test_without_a_schedule_nothing_is_folded(tmp_path: Path) -> None:
    training = Training()
    with Publisher.open(str(tmp_path), training.model, folds=None, anchors=None) as publisher:
        for _ in range(4):
            training.step()
            publisher.publish(training.model)
    assert DeltaLog.open(str(tmp_path)).latest().catalog is None


def test_a_resumed_publisher_writes_the_folds_of_recent_versions_that_a_kill_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    with Publisher.open(str(tmp_path), training.model, folds=None, anchors=None) as publisher:
        for _ in range(9):
            training.step()
            publisher.publish(training.model)
    monkeypatch.setattr("vllm_delta_sync.log.folder._TAKEN_UP", 4)
    Publisher.open(str(tmp_path), resume=True, folds=SCHEDULE, anchors=None).close()
    log = DeltaLog.open(str(tmp_path))
    ends = {(fold.source, fold.to) for fold in log.catalog().folds}
    # 6 … 9 are looked at; of the two long folds there, the one nearest to the tip is written.
    none = Catalog(run=log.run)
    assert ends == {*SCHEDULE.missing(none, 6, 8, waiting=[9]), *SCHEDULE.missing(none, 9, 9)}
    assert (3, 9) in ends and (0, 6) not in ends
    sequence = log.latest().sequence
    Publisher.open(str(tmp_path), resume=True, folds=SCHEDULE, anchors=None).close()
    assert log.latest().sequence == sequence  # nothing is written twice
    assert checks.verify(log).faults == ()
