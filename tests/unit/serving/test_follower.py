"""Watching a bucket: every trouble is told and survived, and what is told can be followed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.unit.serving.watched import Watched, follower, tip
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.errors import RateLimited
from vllm_delta_sync.log.pointer import update
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.follower import LAST_BACK_OFF_S, MOST_UNANSWERED, RUN_INTERVAL_S


def failure(told: list[msg.Message]) -> msg.PollFailed:
    (only,) = told
    assert isinstance(only, msg.PollFailed)
    return only


def test_an_empty_bucket_is_told_once(watched: Watched) -> None:
    assert watched.look() == [msg.NothingPublished()]
    assert watched.look() == []


def test_what_latest_says_is_told_once_for_one_head_a_look(watched: Watched) -> None:
    with Publisher.open(watched.bucket, base=watched.state, folds=None, anchors=None) as publisher:
        watched.publish(publisher, 2)
        pointer = tip(watched.look())
        assert (pointer.version, pointer.goal) == (2, 2)
        watched.store.read.clear()
        assert watched.look() == []
        assert watched.store.read == [("head", "LATEST")]
        watched.publish(publisher, 3)
        watched.store.read.clear()
        assert tip(watched.look()).version == 5
        assert watched.store.read == [("head", "LATEST"), ("get", "LATEST")]


def test_a_pin_and_its_end_are_told(watched: Watched) -> None:
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        watched.publish(publisher, 2)
    watched.look()
    log = DeltaLog.open(watched.bucket)
    for pin, goal in ((1, 1), (None, 2)):
        update(log, lambda latest, pin=pin: latest.model_copy(update={"pin": pin}))  # type: ignore[misc]
        pointer = tip(watched.look())
        assert (pointer.pin, pointer.goal, pointer.version) == (pin, goal, 2)


def test_another_run_is_seen_within_a_minute_and_not_asked_for_more_often(watched: Watched) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    first = tip(watched.look()).run
    Publisher.open(watched.bucket, base=watched.state).close()
    watched.now += RUN_INTERVAL_S - 1
    assert watched.look() == []
    watched.now += 1
    assert tip(watched.look()).run != first
    watched.store.read.clear()
    assert watched.look() == [] and watched.store.read == [("head", "LATEST")]


def test_a_run_that_is_removed_has_the_current_one_looked_up_at_once(watched: Watched) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    old = watched.latest()
    watched.look()
    Publisher.open(watched.bucket, base=watched.state).close()
    old.unlink()
    assert failure(watched.look()).cause == "not_found"
    assert isinstance(watched.look()[0], msg.Tip)


def test_a_bucket_that_vanishes_is_a_failure_and_then_followed_again(watched: Watched) -> None:
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        watched.look()
        away = watched.bucket.with_name("away")
        watched.bucket.rename(away)
        assert failure(watched.look()).cause == "not_found"
        away.rename(watched.bucket)
        assert watched.look() == []
        watched.publish(publisher)
        assert isinstance(watched.look()[0], msg.Tip)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b"x" * (2 << 20)])
def test_a_latest_that_cannot_be_read_is_named_until_it_can(watched: Watched, damage: bytes) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    watched.look()
    good = watched.latest().read_bytes()
    watched.latest().write_bytes(damage)
    told = failure(watched.look())
    assert told.cause == "malformed" and "LATEST" in told.text
    assert failure(watched.look()).cause == "malformed"
    watched.latest().write_bytes(good)
    assert watched.look() == []  # it says what was told before


def test_failures_are_looked_at_less_and_less_often_and_success_resets(watched: Watched) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    watched.look()
    good = watched.latest().read_bytes()
    watched.latest().write_bytes(b"{}")
    waits = [watched.follower.poll() for _ in range(2000)]  # a night of it
    assert all(1.0 <= wait <= LAST_BACK_OFF_S for wait in waits) and max(waits[6:]) > 3.0
    watched.latest().write_bytes(good)
    assert watched.follower.poll() <= 1.2


def test_a_store_that_asks_for_patience_gets_it(tmp_path: Path) -> None:
    told: list[msg.Message] = []

    def refuse() -> DeltaLog:
        raise RateLimited("slow down", retry_after=17.0)

    assert follower(refuse, told.append).poll() == 18.0
    assert failure(told).cause == "rate_limited"


def test_a_client_that_raises_anything_does_not_end_the_watch(tmp_path: Path) -> None:
    told: list[msg.Message] = []

    def explode() -> DeltaLog:
        raise RuntimeError("a bug in the client")

    watching = follower(explode, told.append)
    watching.poll()
    watching.poll()
    assert [type(message) for message in told] == [msg.PollFailed] * 2


def test_a_run_that_was_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    told: list[msg.Message] = []
    follower(lambda: DeltaLog.open(tmp_path, run="ab" * 16), told.append, must_exist=True).poll()
    assert failure(told).cause == "not_found"


def test_a_store_that_never_answers_is_named_and_followed_again_when_it_does(watched: Watched) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    answering = threading.Event()

    def connect() -> DeltaLog:
        answering.wait(20)
        return DeltaLog.open(watched.bucket)

    told: list[msg.Message] = []
    watching = follower(connect, told.append, deadline_s=0.05)
    before = threading.active_count()
    for _ in range(MOST_UNANSWERED + 3):
        watching.poll()
    assert {message.cause for message in told if isinstance(message, msg.PollFailed)} == {"unavailable"}
    assert len(told) == MOST_UNANSWERED + 3
    assert threading.active_count() - before <= MOST_UNANSWERED  # however long it lasts
    answering.set()
    deadline = time.monotonic() + 20
    while not isinstance(told[-1], msg.Tip):
        assert time.monotonic() < deadline
        watching.poll()
    assert sum(isinstance(message, msg.Tip) for message in told) == 1
