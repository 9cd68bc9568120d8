"""Where a writer takes the time and fresh names from, and how it waits.

Does not promise that a clock is right: readers take it for information only.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass


def _uuid() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Stamps:
    """The system's by default."""

    now: Callable[[], float] = time.time  # Unix seconds
    fresh: Callable[[], str] = _uuid  # 32 hex digits, never the same again
    sleep: Callable[[float], object] = time.sleep  # seconds


SYSTEM = Stamps()
