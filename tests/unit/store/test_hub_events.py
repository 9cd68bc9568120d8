"""Reading the Hub's feed of changes: server-sent events, and what each means for one file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from vllm_delta_sync.errors import Unavailable
from vllm_delta_sync.store.hub import Hub
from vllm_delta_sync.store.hub_events import LASTING_S, Event, after, break_s, changes, events, following_break


def test_events_are_read_line_by_line_and_comments_are_signs_of_life() -> None:
    lines = [": ping", "", "event: ready", 'data: {"cursor":"1"}', "", "data: a", "data:b", "", "event: half"]
    assert list(events(lines)) == [Event("", ""), Event("ready", '{"cursor":"1"}'), Event("", "ab")]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(Unavailable, match="megabyte"):
        list(events(f"data: {'x' * 1000}" for _ in range(2000)))


def _changes(*paths: str, cursor: str = "9") -> Event:
    return Event("changes", json.dumps({"cursor": cursor, "changes": [{"path": path, "op": "add"} for path in paths]}))


@pytest.mark.parametrize(
    ("event", "cursor", "touched"),
    [
        (Event("ready", '{"cursor":"2"}'), "2", False),
        (Event("ready", "{}"), "1", False),
        (_changes("run/LATEST"), "9", True),
        (_changes("run/versions/1", "run/LATEST"), "9", True),
        (_changes("run/LATEST2", "other/LATEST", "LATEST"), "9", False),
        (Event("changes", '{"cursor":"3","changes":7}'), "1", True),  # not understood: look, to be sure
        (Event("changes", "no JSON"), "1", True),
        (Event("changes", "[]"), "1", True),
        (Event("changes", "[" * 100_000), "1", True),
        (Event("reset", '{"reason":"old"}'), None, True),
        (Event("reconnect", '{"cursor":"4"}'), "4", False),
        (Event("news", '{"cursor":"5"}'), "1", False),  # a kind of later Hubs
        (Event("", ""), "1", False),
    ],
)
def test_what_an_event_means_for_a_file(event: Event, cursor: str | None, touched: bool) -> None:
    assert after(event, "1", "run/LATEST") == (cursor, touched)


def test_only_a_connection_that_lasted_makes_the_next_one_come_soon() -> None:
    breaks, waited = 0, 0.0
    for connections in range(1, 20):
        breaks = following_break(breaks, LASTING_S - 1)
        waited += break_s(breaks)
        assert connections <= 6 + waited / 60, "as many as one a minute once it has gone wrong for a while"
    assert break_s(following_break(breaks, LASTING_S)) == break_s(1) <= 2


def test_a_feed_that_closes_after_every_event_is_taken_up_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closing(Hub):
        def lines(self, what: str, path: str, silence_s: float) -> Iterator[str]:
            yield from ["event: ready", 'data: {"cursor":"1"}', ""]

    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            if len(waits) == 8:
                self.set()
            return self.is_set()

    assert len(list(changes(Closing("https://hub.example", 10), "me/b", "LATEST", Stop()))) == 8
    assert waits[6] > 25
