"""Adds up the time spent waiting for what is fetched, apart from what is done with it.

Does not fetch anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")


class Stopwatch:
    """`seconds` of all that was timed so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, work: Callable[[], _Item]) -> _Item:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds += time.perf_counter() - begin

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        iterator = iter(items)
        while True:
            begin = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - begin
            yield item
            del item  # before the next is made: both may be large
