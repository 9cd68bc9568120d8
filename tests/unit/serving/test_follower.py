"""Watching a bucket: every trouble is told and survived, and what is told can be followed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.serving.fleet import train, weights
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.errors import RateLimited
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.follower import LAST_BACK_OFF_S, Follower


class Watched:
    """A bucket with a publisher and a follower on it."""

    def __init__(self, bucket: Path) -> None:
        self.bucket = bucket
        self.told: list[msg.Message] = []
        self.state = weights()
        self.follower = Follower(lambda: DeltaLog.open(bucket), self.told.append, interval_s=1.0)

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


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "bucket")


def failure(told: list[msg.Message]) -> msg.PollFailed:
    (only,) = told
    assert isinstance(only, msg.PollFailed)
    return only


def test_an_empty_bucket_is_told_once(watched: Watched) -> None:
    assert watched.look() == [msg.NothingPublished()]
    assert watched.look() == []


def test_versions_are_told_once_each_with_their_digests(watched: Watched) -> None:
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        watched.publish(publisher, 2)
        (tip,) = watched.look()
        assert isinstance(tip, msg.Tip) and [ref.version for ref in tip.refs] == [0, 1, 2]
        assert watched.look() == []
        watched.publish(publisher, 3)
        (tip,) = watched.look()
        assert isinstance(tip, msg.Tip) and tip.version == 5 and [ref.version for ref in tip.refs] == [3, 4, 5]
    log = DeltaLog.open(watched.bucket)
    assert [log.manifest(ref.to_object()).version for ref in tip.refs] == [3, 4, 5]


def test_a_bucket_that_vanishes_is_a_failure_and_then_followed_again(watched: Watched) -> None:
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        watched.look()
        away = watched.bucket.with_name("away")
        watched.bucket.rename(away)
        assert failure(watched.look()).cause == "not_found"
        away.rename(watched.bucket)
        assert watched.look() == []
        watched.publish(publisher)
        assert isinstance(watched.look()[0], msg.Tip)


def rewind(watched: Watched, before: bytes) -> str:
    watched.latest().write_bytes(before)
    return "LATEST went back"


def truncate(watched: Watched, before: bytes) -> str:
    watched.latest().write_bytes(before[:-5])
    return "LATEST"


def dangle(watched: Watched, before: bytes) -> str:
    pointer = json.loads(watched.latest().read_bytes())
    manifest = next(watched.bucket.rglob(Path(pointer["manifest"]).name))
    manifest.unlink()
    pointer["version"] += 1
    pointer["sha256"] = "0" * 64
    watched.latest().write_bytes(json.dumps(pointer, sort_keys=True, separators=(",", ":")).encode())
    return manifest.name


def new_run(watched: Watched, before: bytes) -> str:
    Publisher.open(watched.bucket, base=watched.state).close()
    return "current run is now"


@pytest.mark.parametrize("trouble", [rewind, truncate, dangle, new_run])
def test_a_pointer_that_cannot_be_followed_is_named(watched: Watched, trouble: Callable[[Watched, bytes], str]) -> None:
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        before = watched.latest().read_bytes()
        watched.publish(publisher)
        watched.look()
    wanted = trouble(watched, before)
    assert wanted in failure(watched.look()).text


def test_a_forked_log_is_refused(watched: Watched, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    with Publisher.open(watched.bucket, base=watched.state) as publisher:
        publisher.wait()
        shutil.copytree(watched.bucket, fork)
        watched.publish(publisher)
    watched.look()
    with Publisher.open(fork, resume=True, base=weights()) as rival:
        watched.state = weights()
        watched.publish(rival, 2)
    shutil.copytree(fork, watched.bucket, dirs_exist_ok=True)
    assert "was forked" in failure(watched.look()).text


def test_failures_are_looked_at_less_and_less_often_and_success_resets(watched: Watched) -> None:
    Publisher.open(watched.bucket, base=watched.state).close()
    watched.look()
    good = watched.latest().read_bytes()
    watched.latest().write_bytes(b"{}")
    waits = [watched.follower.poll() for _ in range(2000)]  # a night of it
    assert all(1.0 <= wait <= LAST_BACK_OFF_S for wait in waits) and max(waits[6:]) > 3.0
    watched.latest().write_bytes(good)
    assert watched.follower.poll() <= 1.2


def test_a_store_that_asks_for_patience_gets_it(tmp_path: Path) -> None:
    told: list[msg.Message] = []

    def refuse() -> DeltaLog:
        raise RateLimited("slow down", retry_after=17.0)

    assert Follower(refuse, told.append, interval_s=1.0).poll() == 18.0
    assert failure(told).cause == "rate_limited"


def test_a_client_that_raises_anything_does_not_end_the_watch(tmp_path: Path) -> None:
    told: list[msg.Message] = []

    def explode() -> DeltaLog:
        raise RuntimeError("a bug in the client")

    follower = Follower(explode, told.append, interval_s=1.0)
    follower.poll()
    follower.poll()
    assert [type(message) for message in told] == [msg.PollFailed] * 2


def test_a_run_that_was_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    told: list[msg.Message] = []
    Follower(lambda: DeltaLog.open(tmp_path, run="ab" * 16), told.append, 1.0, must_exist=True).poll()
    assert failure(told).cause == "not_found"
