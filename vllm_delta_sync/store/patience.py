"""How long a call to a store may take, and when it is tried again.

Does not hold the deadline (`deadline.call_within` does) or know which calls are idempotent: its caller does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from vllm_delta_sync.errors import RateLimited, Unavailable

MIN_RATE = 1 << 20  # bytes/s: a slower transfer counts as stalled
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0

LISTING_TIMES = 10  # the time for one call: a bucket of a million objects has a thousand pages

T = TypeVar("T")


def allowance(timeout_s: float, size: int) -> float:
    """Seconds that a call may take which moves `size` bytes."""
    return timeout_s + size / MIN_RATE


class ListingLimit:
    """Holds the time that a whole listing may take, however many pages it has; it begins now.

    Args:
        timeout_s: seconds that one page may take.
    """

    def __init__(self, timeout_s: float, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._what, self._clock = LISTING_TIMES * timeout_s, what, clock
        self._end = clock() + self._seconds

    def require_time(self) -> None:
        """Raise Unavailable when the time is over."""
        if self._clock() > self._end:
            raise Unavailable(f"{self._what}: the list does not end within {self._seconds:g} s")


def pause(attempt: int, luck: float) -> float:
    """Seconds to wait after failure number `attempt` (from 0): doubling, with half of it by `luck` in [0, 1)."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * (0.5 + luck / 2))


def retried(
    seconds: float,
    call: Callable[[], T],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    luck: Callable[[], float] = random.random,
) -> T:
    """The result of an idempotent call that is tried again while the store is unavailable, for so many seconds in all.

    Raises the last failure when there is no time for another try, and at once any that patience does not cure. A store
    that says when it will answer again is believed.
    """
    end, attempt = clock() + seconds, 0
    while True:
        try:
            return call()
        except (Unavailable, RateLimited) as error:
            wait = error.retry_after if isinstance(error, RateLimited) else pause(attempt, luck())
            if clock() + wait >= end:
                raise
            sleep(wait)
            attempt += 1
