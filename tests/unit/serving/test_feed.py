"""A store that tells of changes is looked at at once, and no more often than its quota bears."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from tests.unit.serving.watched import Counted, Watched, follower, tip
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.serving import follower as following
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.follower import LEAST_GAP_S, METERED_BURST, METERED_LOOKS_A_MINUTE, Follower, Looks
from vllm_delta_sync.store import Store, open_store


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


def test_no_feed_outlives_a_watch_that_is_stopped_during_its_first_look(watched: Watched) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    store = Telling(open_store(str(watched.bucket)))

    def connect() -> DeltaLog:
        watching.stop()
        return DeltaLog.open(store)

    watching = Follower(connect, watched.told.append, 3600.0, deadline_s=20.0)
    watching.run()
    assert watching._feed is not None and watching._feed._stopped.is_set()
    store.said.put(None)


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
