"""Watching a bucket: every trouble is told and survived, and what is told can be followed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_training import TroubledStore
from tests.unit.serving.fleet import train, weights
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.errors import RateLimited
from vllm_delta_sync.log.pointer import update
from vllm_delta_sync.serving import follower as following
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.follower import (
    LAST_BACK_OFF_S,
    LEAST_GAP_S,
    METERED_BURST,
    METERED_LOOKS_A_MINUTE,
    MOST_UNANSWERED,
    RUN_INTERVAL_S,
    Follower,
    Looks,
)
from vllm_delta_sync.store import Content, ObjectInfo, Store, open_store
from vllm_delta_sync.wire.manifest import LatestPointer


class Watched:
    """A bucket with a publisher and a follower on it, whose clock stands still unless it is moved."""

    def __init__(self, bucket: Path) -> None:
        self.bucket = bucket
        self.told: list[msg.Message] = []
        self.state = weights()
        self.now = 1000.0
        self.store = Counted(open_store(str(bucket)))
        self.follower = follower(lambda: DeltaLog.open(self.store), self.told.append, clock=lambda: self.now)

    def look(self) -> list[msg.Message]:
        """What one poll tells."""
        self.told.clear()
        self.follower.poll()
        return list(self.told)

    def publish(self, publisher: Publisher, versions: int = 1) -> None:
        for step in range(versions):
            train(self.state, step)
            publisher.publish(self.state)
        publisher.wait()

    def latest(self) -> Path:
        return next(self.bucket.glob("*/LATEST"))


class Counted(TroubledStore):
    """A store that counts what is read of it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: list[tuple[str, str]] = []

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        self.read.append(("get", key.rpartition("/")[2]))
        return self.inner.get(key, start, end, content=content)

    def head(self, key: str) -> ObjectInfo:
        self.read.append(("head", key.rpartition("/")[2]))
        return self.inner.head(key)


def follower(
    open_log: Callable[[], DeltaLog],
    tell: Callable[[msg.Message], None],
    *,
    must_exist: bool = False,
    deadline_s: float = 20.0,
    clock: Callable[[], float] = time.monotonic,
) -> Follower:
    return Follower(open_log, tell, 1.0, must_exist=must_exist, deadline_s=deadline_s, clock=clock)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "bucket")


def failure(told: list[msg.Message]) -> msg.PollFailed:
    (only,) = told
    assert isinstance(only, msg.PollFailed)
    return only


def test_an_empty_bucket_is_told_once(watched: Watched) -> None:
    assert watched.look() == [msg.NothingPublished()]
    assert watched.look() == []


def tip(told: list[msg.Message]) -> LatestPointer:
    (only,) = told
    assert isinstance(only, msg.Tip)
    return only.pointer


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


class Telling(Counted):
    """A store that says when something changed."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.said: queue.Queue[None] = queue.Queue()

    def changes(self, key: str, stop: threading.Event) -> Iterator[None]:
        while not stop.is_set():
            yield self.said.get()


def test_a_store_that_says_that_latest_changed_is_looked_at_at_once(watched: Watched) -> None:
    told: queue.Queue[msg.Message] = queue.Queue()
    store = Telling(open_store(str(watched.bucket)))
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        publisher.wait()
        watching = Follower(lambda: DeltaLog.open(store), told.put, 3600.0, deadline_s=20.0)
        thread = threading.Thread(target=watching.run, daemon=True)
        thread.start()
        assert isinstance(told.get(timeout=20), msg.Tip)
        watched.publish(publisher)
        store.said.put(None)
        pointer = tip([told.get(timeout=20)])
        assert pointer.version == 1
        watching.stop()
        store.said.put(None)
        thread.join(20)
        assert not thread.is_alive()


def looks_in(minutes: float, interval_s: float, every_s: float) -> int:
    """Looks in so many minutes by someone who polls at an interval, beside events that come at another one."""
    looks, now, count = Looks(METERED_LOOKS_A_MINUTE), 0.0, 0
    while now < minutes * 60:
        count += 1
        looks.take(now)
        event = (now // every_s + 1) * every_s
        now += min(interval_s, max(event - now, looks.wait_s(now), LEAST_GAP_S))
    return count


@pytest.mark.parametrize(
    ("interval_s", "every_s", "a_minute"),
    [
        (5.0, 1000.0, 12),  # nothing happens
        (5.0, 2.0, 15),
        (5.0, 0.1, 15),
        (60.0, 2.0, 15),
        (1.0, 0.1, 60),  # as often as was asked for, no more
        (60.0, 30.0, 2),  # each event is followed at once
    ],
)
def test_events_bring_about_so_many_looks_where_each_counts(interval_s: float, every_s: float, a_minute: int) -> None:
    assert a_minute * 10 - 1 <= looks_in(10, interval_s, every_s) <= a_minute * 10 + METERED_BURST


def test_an_event_after_a_quiet_time_is_followed_at_once_and_many_are_not(watched: Watched) -> None:
    watched.store = Metered(watched.store.inner)
    Publisher.open(watched.bucket, base=watched.state).close()
    watched.look()
    assert [watched.follower.least_gap_s() for _ in range(4)] == [LEAST_GAP_S, LEAST_GAP_S, 4.0, 4.0]
    watched.now += 60
    assert watched.follower.least_gap_s() == LEAST_GAP_S


class Metered(Counted):
    metered = True  # type: ignore[assignment]


class Listened(Telling):
    """A store that tells when it is listened to."""

    def __init__(self, inner: Store, *, metered: bool) -> None:
        super().__init__(inner)
        self.counts = metered
        self.listened = threading.Event()

    @property
    def metered(self) -> bool:
        return self.counts

    def changes(self, key: str, stop: threading.Event) -> Iterator[None]:
        self.listened.set()
        return iter(())


def test_where_requests_count_followers_do_not_all_begin_to_listen_at_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FEED_SPREAD_S", 1e6)  # so that chance does not begin at once
    Publisher.open(watched.bucket, base=watched.state).close()
    stores = [Listened(open_store(str(watched.bucket)), metered=metered) for metered in (True, False)]
    followers = [follower(lambda store=store: DeltaLog.open(store), watched.told.append) for store in stores]  # type: ignore[misc]
    for one in followers:
        one.poll()
    assert stores[1].listened.wait(10)
    assert not stores[0].listened.wait(0.05)
    for one in followers:
        one.stop()
