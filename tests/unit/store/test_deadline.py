"""A deadline over a call that has none of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from vllm_delta_sync.errors import NotFound, Unavailable
from vllm_delta_sync.store import deadline
from vllm_delta_sync.store.deadline import call_within


def test_what_the_call_returns_or_raises_comes_through() -> None:
    assert call_within(5, "adding", lambda: 2 + 3) == 5

    def fail() -> int:
        raise NotFound("gone")

    with pytest.raises(NotFound, match="gone"):
        call_within(5, "looking", fail)


def test_a_timeout_of_the_call_itself_is_not_taken_for_the_deadline() -> None:
    def fail() -> int:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        call_within(5, "looking", fail)


def test_a_call_that_hangs_is_given_up_by_name_and_told_so() -> None:
    abandoned, ended = threading.Event(), threading.Event()

    def hang() -> None:
        abandoned.wait(30)
        ended.set()

    begin = time.monotonic()
    with pytest.raises(Unavailable, match=r"reading hf://x: no answer within 0\.05 s"):
        call_within(0.05, "reading hf://x", hang, abandoned)
    assert time.monotonic() - begin < 5
    assert ended.wait(5)


def test_a_call_that_ends_at_the_deadline_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    over, ended = threading.Event(), threading.Event()

    class AtTheDeadline(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            try:
                return super().result(timeout)
            except TimeoutError:
                over.set()
                assert ended.wait(5)
                raise

        def set_result(self, result: int) -> None:
            super().set_result(result)
            ended.set()

    def call() -> int:
        assert over.wait(5)
        return 7

    monkeypatch.setattr(deadline, "Future", AtTheDeadline)
    assert call_within(0.01, "looking", call) == 7


def test_a_call_that_ends_in_time_is_not_told_otherwise() -> None:
    abandoned = threading.Event()
    assert call_within(5, "looking", lambda: 1, abandoned) == 1
    assert not abandoned.is_set()
