"""A rank's background threads end with its engine, whatever they are doing then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.serving.fleet import weights
from vllm_delta_sync import Publisher, kernels
from vllm_delta_sync.config import parse
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.agent import Agent
from vllm_delta_sync.serving.channel import Hub
from vllm_delta_sync.serving.rank import Rank


class Slow(Rank):
    """A rank whose proof takes until it may end."""

    def __init__(self) -> None:
        super().__init__(0, lambda device: kernels.select("auto", device), 1 << 20, None)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def prove(self) -> msg.Proved:
        self.begun.set()
        self.may_end.wait(20)
        return msg.Proved(np.zeros((0, 4), np.uint32), 0.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Hub, Slow]]:
    """The engine's end, and a leader that follows a bucket."""
    Publisher.open(tmp_path, base=weights()).close()
    told = threading.Event()
    hub, rank = Hub(lambda number, message: told.set()), Slow()
    config = parse({"store": f"file://{tmp_path}", "poll_interval_s": 0.05}, "test")
    Agent(rank, config, hub.address, hub.authkey, ()).start()
    hub.wait_for(1, 5.0)
    assert told.wait(20)  # what LATEST says
    yield hub, rank
    rank.may_end.set()
    hub.close()


def left() -> set[str]:
    """Threads of a rank that do not end."""
    deadline = time.monotonic() + 5
    while True:
        names = {thread.name for thread in threading.enumerate()} & {"delta-sync-follower", "delta-sync-commands-0"}
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_follows_no_more_when_its_engine_is_gone(busy: bool, engine: tuple[Hub, Slow]) -> None:
    hub, rank = engine
    if busy:
        hub.send(0, msg.Prove())
        assert rank.begun.wait(5)
    hub.close()
    rank.may_end.set()
    assert left() == set()
