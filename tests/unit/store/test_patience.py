"""How long a call may take, and how often it is tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.errors import DeltaSyncError, NotFound, RateLimited, Unavailable
from vllm_delta_sync.store.patience import LONGEST_PAUSE_S, ListingLimit, allowance, pause, retried


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Call:
    """Raises the given errors one after the other, then returns 'done'."""

    def __init__(self, *errors: DeltaSyncError) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_call_may_take_a_second_more_for_each_mebibyte() -> None:
    assert allowance(60.0, 0) == 60
    assert allowance(60.0, 256 << 20) == 60 + 256


def test_an_unavailable_store_is_asked_again_with_growing_pauses() -> None:
    clock, call = Clock(), Call(Unavailable("a"), Unavailable("b"), Unavailable("c"))
    assert retried(60, call, clock=clock, sleep=clock.sleep, luck=lambda: 0.0) == "done"
    assert clock.slept == [0.1, 0.2, 0.4]


def test_a_store_that_asks_for_patience_is_believed() -> None:
    clock, call = Clock(), Call(RateLimited("a", 7.0))
    assert retried(60, call, clock=clock, sleep=clock.sleep) == "done"
    assert clock.slept == [7.0]


def test_the_last_failure_is_raised_when_there_is_no_time_for_another_try() -> None:
    clock, call = Clock(), Call(*(Unavailable(str(number)) for number in range(100)))
    with pytest.raises(Unavailable):
        retried(5, call, clock=clock, sleep=clock.sleep)
    assert sum(clock.slept) < 5
    assert 3 < call.count < 100


def test_a_wait_longer_than_the_time_left_is_not_begun() -> None:
    clock, call = Clock(), Call(RateLimited("a", 300.0))
    with pytest.raises(RateLimited):
        retried(60, call, clock=clock, sleep=clock.sleep)
    assert clock.slept == []


def test_what_patience_does_not_cure_is_raised_at_once() -> None:
    clock, call = Clock(), Call(NotFound("a"))
    with pytest.raises(NotFound):
        retried(60, call, clock=clock, sleep=clock.sleep)
    assert (call.count, clock.slept) == (1, [])


@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_positive_and_bounded(attempt: int, luck: float) -> None:
    assert 0.1 <= pause(attempt, luck) <= LONGEST_PAUSE_S


def test_a_listing_may_take_as_long_as_many_calls_and_no_longer() -> None:
    clock = Clock()
    limit = ListingLimit(6.0, "listing hf://x", clock)
    clock.sleep(59.0)
    limit.require_time()
    clock.sleep(2.0)
    with pytest.raises(Unavailable, match="listing hf://x: the list does not end within 60 s"):
        limit.require_time()
