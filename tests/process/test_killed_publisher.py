"""A publisher killed at any point leaves no half version, and the next one goes on from what it left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_training import digest, logged

from vllm_delta_sync.errors import NotFound
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.store import open_store

WRITES_TO_BEGIN = 5  # anchor, table, manifest, LATEST, RUN
WRITES_OF_A_VERSION = 4  # shard, table, manifest, LATEST


class Trainers:
    """Runs trainer processes one after the other on one bucket, and kills them."""

    def __init__(self, server: subprocess.Popen[str], directory: Path) -> None:
        self.server, self.bucket, self.ledger = server, str(directory / "bucket"), directory / "ledger"

    def run(self, steps: int, writes: int = 0, seconds: float | None = None) -> int:
        """Run one until it ends, dies at its `writes`-th write or is killed after `seconds`; its wait status."""
        assert self.server.stdin and self.server.stdout
        print(self.bucket, self.ledger, steps, writes, file=self.server.stdin, flush=True)
        pid = int(self.server.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
        return int(self.server.stdout.readline().removeprefix("ended "))

    def expected(self) -> dict[int, set[str]]:
        """Version → digests of the states that a trainer was about to publish as that version."""
        found: dict[int, set[str]] = {}
        for line in self.ledger.read_text().splitlines() if self.ledger.exists() else []:
            version, state = line.split()
            found.setdefault(int(version), set()).add(state)
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).parent / "publish_loop.py")
    server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield server
    server.kill()
    server.wait()


@pytest.fixture
def trainers(server: subprocess.Popen[str], tmp_path: Path) -> Trainers:
    return Trainers(server, tmp_path)


def check_log(trainers: Trainers) -> int:
    """The tip's version; it and the version before are complete, and what a trainer meant to publish."""
    store = open_store(trainers.bucket)
    tip = DeltaLog.open(store).tip().version
    for version in range(max(1, tip - 1), tip + 1):
        assert digest(logged(store, version)) in trainers.expected()[version]
    return tip


def test_killed_before_any_of_its_writes_it_leaves_whole_versions_and_is_resumed(trainers: Trainers) -> None:
    for write in range(1, WRITES_TO_BEGIN + 1):
        assert trainers.run(steps=3, writes=write) == signal.SIGKILL
        with pytest.raises(NotFound):
            DeltaLog.open(open_store(trainers.bucket))
    assert trainers.run(steps=0) == 0
    run = DeltaLog.open(open_store(trainers.bucket)).run
    tips = [0]
    for write in range(1, 2 * WRITES_OF_A_VERSION + 2):
        assert trainers.run(steps=4, writes=write) == signal.SIGKILL
        tips.append(check_log(trainers))
    durable = [after - before for before, after in pairwise(tips)]
    assert durable == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert trainers.run(steps=2) == 0
    assert check_log(trainers) == tips[-1] + 2
    assert DeltaLog.open(open_store(trainers.bucket)).run == run


def test_killed_at_any_time_it_is_resumed_with_nothing_lost(trainers: Trainers) -> None:
    assert trainers.run(steps=1) == 0
    first = tip = check_log(trainers)
    clock = random.Random(6)
    longest, kills = 0.4, 0
    while kills < 8 or tip == first:  # on a slow machine a trainer may need longer to get as far as publishing
        assert trainers.run(steps=10_000, seconds=clock.uniform(0.0, longest)) == signal.SIGKILL
        before, tip = tip, check_log(trainers)
        assert tip >= before
        kills += 1
        if kills >= 8:
            longest *= 2
        assert longest < 60, "no trainer published anything before it was killed"
    assert trainers.run(steps=2) == 0
    assert check_log(trainers) == tip + 2
