"""A whole run on every store: published, followed, verified, taken up again; followed through a network's faults."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import servers
import tiny_log
import torch
from hub_buckets import HUNG_S, unused
from tiny_training import logged, state_of

from tests.hub.process import WRITER, HubProcess
from vllm_delta_sync.errors import DeltaSyncError, PublishError, RivalWriter
from vllm_delta_sync.log import DeltaLog, FoldSchedule, LogWriter, pointer
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.tail import Tail, TipWatch
from vllm_delta_sync.log.verify import verify
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.trainer import Publisher
from vllm_delta_sync.wire.checkpoint import write_checkpoint

QUICK_S, PATIENT_S = 2.0, 6.0  # of one call that is never answered; of one that is, also by a busy machine


def begin(store: Store, base: Path, model: tiny_log.Model) -> LogWriter:
    """A run whose base checkpoint is in `base` and, as an anchor, in the store."""
    files = write_checkpoint(base, model.values())
    return LogWriter.create(store, tiny_log.lanes_of(model), base=None, anchor=files)


def test_a_run_is_published_followed_verified_and_taken_up_again(store: Store, tmp_path: Path) -> None:
    models = [tiny_log.random_model()]
    writer = begin(store, tmp_path / "base", models[0])
    replica = Replica(DeltaLog.open(store))
    for version in (1, 2, 3):
        models.append(tiny_log.changed_model(models[-1], version))
        if version == 3:
            writer = LogWriter.attach(DeltaLog.open(store))
        tiny_log.commit(writer, models[-2], models[-1])
        replica.follow(replica.log.latest())
        assert replica.version == version
        assert tiny_log.same(replica.tensors, models[version])
    verdict = verify(DeltaLog.open(store))
    assert (verdict.versions, verdict.faults) == (4, ())


def test_the_second_of_two_publishers_stops_at_its_first_version_and_names_the_other(
    store: Store, tmp_path: Path
) -> None:
    base = tiny_log.random_model()
    first = begin(store, tmp_path / "base", base)
    second = LogWriter.attach(DeltaLog.open(store))
    ours, theirs = (tiny_log.changed_model(base, seed) for seed in (1, 2))
    tiny_log.commit(first, base, ours)
    with pytest.raises(RivalWriter, match=r"names version 1 .* not version 0"):
        tiny_log.commit(second, base, theirs)
    tiny_log.commit(first, ours, tiny_log.changed_model(ours, 3))
    verdict = verify(DeltaLog.open(store))
    assert (verdict.versions, verdict.faults) == (3, ())


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_trainer_publishes_to_a_uri(kind: str, running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "memory://trainer/run-1"
    if kind == "s3":
        config = servers.new_bucket(running.endpoint("moto"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", config.endpoint_url)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        uri = f"{config.uri}/run-1"
    weights = {"w": torch.zeros(1000)}
    with Publisher.open(uri, weights) as publisher:
        weights["w"][::100] = 1
        publisher.publish(weights)
    with Publisher.open(uri, weights, resume=True) as publisher:
        weights["w"][::50] = 2
        assert publisher.publish(weights).result(timeout=30).version == 2
    assert logged(open_store(uri)) == state_of(weights)


# --- through the faults of a network ---------------------------------------------------------------------------------
class Follower:
    """A replica with a store and patience of its own."""

    def __init__(self, uri: str, timeout_s: float = PATIENT_S) -> None:
        log = DeltaLog.open(open_store(uri, timeout_s=timeout_s))
        self.replica = Replica(log)
        self._watch, self._pointer = TipWatch(log), log.latest()

    def look(self) -> str:
        """Look once; returns the cause for which it stays where it is, or nothing."""
        try:
            self._pointer = self._watch.look() or self._pointer
            self.replica.follow(self._pointer)
        except DeltaSyncError as error:
            return error.cause
        return ""

    def goes_on(self) -> bool:
        """Whether it does, as soon as the streams that a fault left hanging in this process have ended."""
        deadline = time.monotonic() + HUNG_S
        while (cause := self.look()) == "unavailable" and time.monotonic() < deadline:
            pass
        return cause == ""


@pytest.fixture
def bucket(hub: HubProcess) -> Store:
    return open_store(unused())


# What is damaged here is compressed, and the client notices; tests/stores/test_hf.py has bytes that it does not notice.
@pytest.mark.parametrize(
    ("kind", "on", "details", "cause"),
    [
        ("flip", "fetch", {}, "unavailable"),
        ("swap", "fetch", {}, "unavailable"),
        ("truncate", "fetch", {}, "unavailable"),
        ("status", "resolve", {"status": 500}, "unavailable"),
        ("status", "resolve", {"status": 401}, "unauthorized"),
        ("status", "resolve", {"status": 429, "headers": {"RateLimit": '"resolvers";r=0;t=55'}}, "rate_limited"),
        ("stall", "resolve", {}, "unavailable"),
        ("stall", "fetch", {}, "unavailable"),
        ("stall_body", "fetch", {}, "unavailable"),
    ],
)
def test_a_follower_keeps_what_it_has_names_the_fault_and_goes_on_when_it_is_over(
    hub: HubProcess, bucket: Store, tmp_path: Path, kind: str, on: str, details: dict[str, Any], cause: str
) -> None:
    first = tiny_log.random_model()
    writer = begin(bucket, tmp_path / "base", first)
    follower = Follower(bucket.uri, QUICK_S if kind.startswith("stall") else PATIENT_S)
    second = tiny_log.changed_model(first, 1)
    tiny_log.commit(writer, first, second)
    hub.fault(kind, on, times=None, **details)
    assert follower.look() == cause
    assert follower.replica.version == 0
    assert tiny_log.same(follower.replica.tensors, first)
    hub.heal()
    assert follower.goes_on()
    assert tiny_log.same(follower.replica.tensors, second)


def test_a_follower_whose_token_is_revoked_goes_on_when_it_may_again(
    hub: HubProcess, bucket: Store, tmp_path: Path
) -> None:
    first = tiny_log.random_model()
    writer = begin(bucket, tmp_path / "base", first)
    follower = Follower(bucket.uri)
    second = tiny_log.changed_model(first, 1)
    tiny_log.commit(writer, first, second)
    hub.control(rights={WRITER: "none"})
    assert follower.look() == "unauthorized"
    hub.heal()
    assert follower.look() == ""
    assert tiny_log.same(follower.replica.tensors, second)


@pytest.mark.parametrize("lost", ["safetensors", "manifest", "LATEST"])
def test_a_version_of_which_the_bucket_loses_a_part_is_not_visible_and_the_next_publish_brings_it(
    hub: HubProcess, bucket: Store, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointer, "_LATE_S", (0.1, 0.1))  # nothing comes late here
    weights = {"w": torch.zeros(1000)}
    with Publisher.open(bucket, weights, anchor="always") as publisher:
        follower = Follower(bucket.uri)
        hub.fault("lose", "batch", path=lost, times=None)
        weights["w"][::100] = 1
        publisher.publish(weights)
        with pytest.raises(PublishError, match="version 1 did not become durable"):
            publisher.wait()
        assert follower.look() == ""
        assert follower.replica.version == 0
        hub.heal()
        weights["w"][::50] = 2
        publisher.publish(weights).result(timeout=60)
    assert follower.look() == ""
    assert follower.replica.version == 1
    assert logged(bucket) == state_of(weights)
    assert not verify(DeltaLog.open(bucket)).faults


def test_requests_to_the_hub_are_as_few_as_operations_says(hub: HubProcess, bucket: Store) -> None:
    versions, weights = 5, {"w": torch.zeros(1000)}
    with Publisher.open(bucket, weights, anchor="always", folds=None, anchors=None) as publisher:
        hub.control(forget_counts=True)
        for version in range(versions):
            weights["w"][version] = 1
            publisher.publish(weights)
            publisher.wait()
        counts = hub.counts()
        assert (counts["api"] - counts.get("token", 0), counts["resolver"]) == (3 * versions, 2 * versions)
        tail = Tail(DeltaLog.open(open_store(bucket.uri)))
        tail.look()
        weights["w"][:100] = 2
        publisher.publish(weights)
        publisher.wait()
        hub.control(forget_counts=True)
        assert len(tail.look()) == 1
        assert tail.look() == []
        counts = hub.counts()
        assert (counts.get("api", 0) - counts.get("token", 0), counts["resolver"]) == (0, 2), "one for each look"


def test_folds_add_one_request_to_every_second_version(hub: HubProcess, bucket: Store) -> None:
    versions, weights = 8, {"w": torch.zeros(1000)}
    with Publisher.open(bucket, weights, anchor="always", folds=FoldSchedule(base=2, levels=5, reach=0)) as publisher:
        hub.control(forget_counts=True)
        for version in range(versions):
            weights["w"][version] = 1
            publisher.publish(weights)
            publisher.wait()
    counts = hub.counts()
    # With the last catalog, which no version takes along.
    assert counts["api"] - counts.get("token", 0) == 3 * versions + versions // 2 + 1
    log = DeltaLog.open(bucket)
    assert {(fold.source, fold.to) for fold in log.catalog().folds} == {
        (to - length, to) for to in range(1, 9) for length in FoldSchedule(base=2, levels=5, reach=0).lengths(to)
    }
    assert not verify(log).faults
