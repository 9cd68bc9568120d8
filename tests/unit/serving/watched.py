"""A bucket with a publisher and a follower on it, and stores that count what is read of them.

Holds no assertions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.tiny_training import TroubledStore
from tests.unit.serving.fleet import train, weights
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.follower import Follower
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


def tip(told: list[msg.Message]) -> LatestPointer:
    (only,) = told
    assert isinstance(only, msg.Tip)
    return only.pointer
