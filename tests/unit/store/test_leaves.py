"""Leave to use the Xet store: asked for once for all who want it, and given up by whoever does not wait any more."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_delta_sync.errors import Unavailable
from vllm_delta_sync.store import xet
from vllm_delta_sync.store.hub import Answer, Hub
from vllm_delta_sync.store.leaves import leave
from vllm_delta_sync.store.protocol import Content
from vllm_delta_sync.store.xet import XetTransfers


class Asked(Hub):
    """A Hub that gives a token when `answering` is set, or says `error` then."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, 10.0)
        self.answering = threading.Event()
        self.error: Exception | None = None
        self.count = 0

    def ask(self, what: str, method: str, path: str, **details: Any) -> Answer:
        self.count += 1
        assert self.answering.wait(20)
        if self.error is not None:
            raise self.error
        token = {"casUrl": "http://127.0.0.1:9", "accessToken": f"token-{self.count}", "exp": time.time() + 900}
        return Answer(200, {}, json.dumps(token).encode())


def at_once(hub: Asked, count: int, act: Callable[[], object]) -> list[object]:
    """What each of `count` calls returned or raised, the Hub answering only once all of them wait."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(act())
        except Unavailable as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    hub.answering.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return found


def test_the_hub_is_asked_once_for_all_who_want_leave_at_the_same_time() -> None:
    hub = Asked("https://once.example")
    found = at_once(hub, 8, lambda: leave(hub, "me/b", "read", "reading"))
    assert hub.count == 1 and len({id(one) for one in found}) == 1 and len(found) == 8
    assert leave(hub, "me/b", "read", "reading") is found[0]
    assert leave(hub, "me/b", "read", "reading", other_than=found[0]) is not found[0]  # type: ignore[arg-type]
    assert hub.count == 2


def test_a_failure_is_one_for_all_who_waited_and_the_next_asks_again() -> None:
    hub = Asked("https://failing.example")
    hub.error = Unavailable("no answer")
    assert at_once(hub, 8, lambda: leave(hub, "me/b", "read", "reading")) == [hub.error] * 8
    assert hub.count == 1
    hub.error = None
    assert leave(hub, "me/b", "read", "reading").token == "token-2"


def test_what_nobody_waits_for_any_more_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Asked("https://hanging.example")
    reads: list[object] = []
    monkeypatch.setattr(xet, "read_stream", lambda *arguments: reads.append(arguments) or b"")
    monkeypatch.setattr(xet, "read_file", lambda *arguments: reads.append(arguments) or b"")
    transfers = XetTransfers(hub, "me/b", 0.1)
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"no answer within 0\.1"):
            transfers.download(Content("a" * 64, 10), 0, 10, "reading a")
    hub.answering.set()
    end = time.monotonic() + 10
    while any(thread.name == "store-call" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert reads == []
