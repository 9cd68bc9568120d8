"""A publisher killed at any point leaves no half version, and the next one goes on from what it left.

`CRASHES` in the environment sets at how many random points (`make test-crashes`: 50).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tiny_training import digest, logged

from vllm_delta_sync.errors import NotFound
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.schedule import FOLDS
from vllm_delta_sync.log.tail import TipWatch
from vllm_delta_sync.log.verify import verify
from vllm_delta_sync.store import open_store
from vllm_delta_sync.wire.manifest import LatestPointer

KILLS = int(os.environ.get("CRASHES", "12"))

WRITES_TO_BEGIN = 5  # anchor, shard, manifest, LATEST, RUN
WRITES_OF_A_VERSION = 3  # shard, manifest, LATEST


class Trainers:
    """Runs trainer processes one after the other on one bucket, and kills them."""

    def __init__(self, server: subprocess.Popen[str], directory: Path) -> None:
        self.server, self.bucket, self.ledger = server, str(directory / "bucket"), directory / "ledger"

    def run(self, steps: int, writes: int = 0, folds: bool = False) -> int:
        """Run one until it ends or dies at its `writes`-th write; its wait status."""
        self._start(steps, writes, folds)
        return self._ended()

    def kill(self, published: int, seconds: float) -> int:
        """Run one, and kill it so long after it began to publish its so many-th version (0: began); its wait status."""
        lines = self._lines() + published
        pid = self._start(10_000, 0, True)
        deadline = time.monotonic() + 60
        while self._lines() < lines:
            assert time.monotonic() < deadline, "the trainer publishes nothing"
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        return self._ended()

    def _lines(self) -> int:
        return self.ledger.read_bytes().count(b"\n")

    def _start(self, steps: int, writes: int, folds: bool) -> int:
        assert self.server.stdin and self.server.stdout
        print(self.bucket, self.ledger, steps, writes, int(folds), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def _ended(self) -> int:
        assert self.server.stdout
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
    assert durable == [0, 0, 0, 1, 1, 1, 2]
    assert trainers.run(steps=2) == 0
    assert check_log(trainers) == tips[-1] + 2
    assert DeltaLog.open(open_store(trainers.bucket)).run == run


class Beside(threading.Thread):
    """A follower beside the trainers: takes every version that it sees, and keeps what it saw and what went wrong."""

    def __init__(self, bucket: str) -> None:
        super().__init__(name="follower", daemon=True)
        self.log = DeltaLog.open(open_store(bucket))
        self.replica = Replica(self.log)
        self.seen: list[tuple[int, str]] = []  # version, digest of the state there
        self.hops: Counter[str] = Counter()
        self.trouble: BaseException | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        watch = TipWatch(self.log)
        try:
            while not self._stopping.wait(0.002):
                if (pointer := watch.look()) is not None:
                    self.go(pointer)
        except BaseException as error:  # told by the test, in its own thread
            self.trouble = error

    def go(self, pointer: LatestPointer) -> None:
        """Hop by hop, so that one that fails is not gone around but told."""
        while hop := self.replica.route.next_hop(pointer, self.replica.held, self.replica.version, pointer.goal):
            self.replica.apply(hop)
            self.hops[hop.kind] += 1
            self.seen.append((hop.to, self.state()))

    def state(self) -> str:
        """The digest of what it holds."""
        return digest({name: np.ascontiguousarray(bits).tobytes() for name, (_, bits) in self.replica.tensors.items()})

    def catch_up(self) -> None:
        """Wait until it holds the tip, and end it."""
        tip = self.log.tip().version
        deadline = time.monotonic() + 30
        while self.is_alive() and self.replica.version < tip and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        self.join(30)


def test_killed_at_any_time_it_is_resumed_with_nothing_lost_and_a_follower_never_sees_a_half_version(
    trainers: Trainers,
) -> None:
    assert trainers.run(steps=1) == 0
    tip = check_log(trainers)
    follower = Beside(trainers.bucket)
    follower.start()
    clock = random.Random(6)
    for _ in range(KILLS):
        # Also soon after its start, when it is still taking up the run.
        assert trainers.kill(clock.randint(0, 6), clock.uniform(0.0, 0.2)) == signal.SIGKILL
        before, tip = tip, follower.log.tip().version
        assert tip >= before
    assert tip > KILLS // 4, "trainers publish next to nothing before they are killed"
    assert trainers.run(steps=2, folds=True) == 0
    assert check_log(trainers) == tip + 2
    follower.catch_up()
    assert follower.trouble is None
    check_followed(trainers, follower)
    # What killed trainers did not come to fold, the last one did, of the versions that it went through one by one.
    taken_up = max(0, tip - 8)
    assert any(to - length >= taken_up for to in range(taken_up, tip + 3) for length in FOLDS.lengths(to))
    missing = FOLDS.missing(follower.log.catalog(), taken_up + 1, tip + 2)
    assert [(source, to) for source, to in missing if source >= taken_up] == []


def check_followed(trainers: Trainers, follower: Beside) -> None:
    """Every version is there, whole, and what a trainer meant to publish; so was every one that the follower saw."""
    log, expected = follower.log, trainers.expected()
    verdict = verify(log)
    assert verdict.faults == ()
    assert [manifest.version for manifest in log.manifests()] == list(range(verdict.versions))
    assert DeltaLog.open(open_store(trainers.bucket)).run == log.run
    assert [version for version, _ in follower.seen] == sorted({version for version, _ in follower.seen})
    for version, state in follower.seen:
        assert state in expected[version]
    *_, last = trainers.ledger.read_text().split()
    assert (follower.replica.version, follower.state()) == (log.tip().version, last)
    late = Beside(trainers.bucket)
    late.go(log.latest())
    assert (late.replica.version, late.state()) == (log.tip().version, last)
    folds = len(log.catalog().folds)
    print(f"{verdict.versions} versions, {folds} folds; {dict(follower.hops)} beside, {dict(late.hops)} afterwards")
