"""Waiting until a write of LATEST can no longer be undone by one that began before it.

Does not write, and waits for nothing where the store has conditional writes: there such a write is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_delta_sync.log import pointer as latest
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire.manifest import LatestPointer

SETTLE_S = 16.0  # a publisher that has looked at LATEST has written it within that, by several requests to a Hub
LOOKS = 4


def settled(
    log: DeltaLog, holds: Callable[[LatestPointer], bool], sleep: Callable[[float], object]
) -> LatestPointer | None:
    """What LATEST says once nothing can come late; None as soon as it does not hold what it should."""
    now = latest.look(log).pointer
    for _ in range(0 if log.store.conditional else LOOKS):
        if not holds(now):
            return None
        sleep(SETTLE_S / LOOKS)
        now = latest.look(log).pointer
    return now if holds(now) else None
