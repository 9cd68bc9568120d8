"""A server on a Hugging Face bucket through every fault of the network: it serves on, names the cause, and goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_buckets import HUNG_S, unused

from tests.hub.process import WRITER, HubProcess
from tests.unit.serving.fleet import train, weights
from tests.unit.serving.served import Served
from vllm_delta_sync import Publisher
from vllm_delta_sync.errors import Unavailable
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.pinning import pin
from vllm_delta_sync.serving import follower as following
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.follower import Follower
from vllm_delta_sync.store import Store, open_store

QUICK_S = 2.0  # of one call; short, because failing ones take all of it


class Training:
    """A trainer that publishes into a bucket of its own, and a server of it that is in step."""

    def __init__(self, cache: NodeCache | None = None) -> None:
        self.bucket: Store = open_store(unused())
        self.state = weights()
        self.publisher = Publisher.open(self.bucket, base=self.state, folds=None, anchors=None)
        self.states = [self.copied()]
        self.step()
        wait_for_streams(self.bucket)
        self.server = Served(open_store(self.bucket.uri, timeout_s=QUICK_S), weights(), cache=cache)
        self.server.look()
        self.server.look(60.0)

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def step(self) -> None:
        train(self.state, len(self.states))
        self.publisher.publish(self.state).result(timeout=60)
        self.states.append(self.copied())


def comes_to_serve(server: Served, state: dict[str, torch.Tensor]) -> bool:
    """Whether it does, as soon as the streams that a fault left hanging have ended."""
    deadline = time.monotonic() + HUNG_S
    while not server.serves(state) and time.monotonic() < deadline:
        server.look(60.0)
    return server.serves(state)


def wait_for_streams(bucket: Store) -> None:
    """Until a transfer is quick: those that faults of earlier tests left hanging keep this process's others waiting."""
    deadline = time.monotonic() + HUNG_S
    while True:
        try:
            DeltaLog.open(open_store(bucket.uri, timeout_s=QUICK_S)).manifests()
            return
        except Unavailable:
            if time.monotonic() > deadline:
                raise


@pytest.fixture
def training(hub: HubProcess) -> Iterator[Training]:
    made = Training()
    yield made
    made.publisher.close()


@pytest.mark.parametrize(
    ("kind", "on", "details", "cause"),
    [
        ("flip", "fetch", {}, "unavailable"),
        ("swap", "fetch", {}, "unavailable"),
        ("truncate", "fetch", {}, "unavailable"),
        ("stall", "fetch", {}, "unavailable"),
        ("stall", "resolve", {}, "unavailable"),
        ("status", "resolve", {"status": 500}, "unavailable"),
        ("status", "resolve", {"status": 401}, "unauthorized"),
        ("status", "resolve", {"status": 429, "headers": {"RateLimit": '"resolvers";r=0;t=55'}}, "rate_limited"),
    ],
)
def test_a_server_serves_on_names_the_fault_and_recovers_by_itself(
    hub: HubProcess, training: Training, kind: str, on: str, details: dict[str, Any], cause: str
) -> None:
    server = training.server
    assert server.serves(training.states[1]) and server.status.failures == {}
    training.step()
    hub.fault(kind, on, times=None, **details)
    server.look(1.0)
    assert server.serves(training.states[1]) and server.status.served == 1
    assert set(server.status.failures) == {cause} and str(server.status.last_error).startswith(cause)
    hub.heal()
    assert comes_to_serve(server, training.states[2]) and server.status.served == 2


def test_a_server_waits_as_long_as_the_hub_asks_it_to(hub: HubProcess, training: Training) -> None:
    hub.fault("status", "resolve", status=429, headers={"RateLimit": '"resolvers";r=0;t=55'})
    assert 55.0 <= training.server.follower.poll() <= 57.0


def test_a_revoked_token_is_named_and_a_new_right_followed_again(hub: HubProcess, training: Training) -> None:
    training.step()
    hub.control(rights={WRITER: "none"})
    training.server.look(1.0)
    assert training.server.serves(training.states[1]) and set(training.server.status.failures) == {"unauthorized"}
    hub.heal()
    assert comes_to_serve(training.server, training.states[2])


def test_a_server_in_step_asks_the_hub_once_a_look_and_once_a_version(hub: HubProcess, training: Training) -> None:
    training.server.look(1.0)
    hub.control(forget_counts=True)
    for _ in range(5):
        training.server.look(1.0)
    counts = hub.counts()
    assert (counts.get("resolver", 0), counts.get("api", 0)) == (5, 0)
    training.step()
    hub.control(forget_counts=True)
    training.server.look(1.0)
    counts = hub.counts()
    assert training.server.serves(training.states[2])
    assert (counts.get("resolver", 0), counts.get("api", 0)) == (1, 0)  # all else by content


def test_a_pin_is_followed_on_a_hub_too(training: Training) -> None:
    training.step()
    training.server.look(1.0)
    pin(DeltaLog.open(training.bucket), 1, sleep=lambda seconds: None)
    training.server.look(1.0)
    assert training.server.serves(training.states[1]) and training.server.status.failures == {}


def test_ranks_of_one_host_fetch_once(hub: HubProcess, tmp_path: Path) -> None:
    training = Training(NodeCache(tmp_path / "cache", 1 << 30))
    try:
        (record,) = training.server.status.commits
        shards = sum(shard.size for shard in DeltaLog.open(training.bucket).tip().shards)
        assert record.fetched_bytes <= shards and record.cached_bytes > 0
    finally:
        training.publisher.close()


def test_a_cache_without_room_is_named_and_costs_no_version(hub: HubProcess, tmp_path: Path) -> None:
    training = Training(NodeCache(tmp_path / "cache", 16))
    try:
        assert training.server.serves(training.states[1])
        assert set(training.server.status.failures) == {"cache"}
        training.step()
        training.server.look(1.0)
        assert training.server.serves(training.states[2])
    finally:
        training.publisher.close()


def test_the_hub_tells_a_server_of_a_version_long_before_it_would_look(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FEED_SPREAD_S", 0.0)  # it begins to listen at once
    told: queue.Queue[msg.Message] = queue.Queue()
    store = open_store(training.bucket.uri)
    follower = Follower(lambda: DeltaLog.open(store), told.put, 3600.0, deadline_s=30.0)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    try:
        first = told.get(timeout=30)
        training.step()
        second = told.get(timeout=30)
    finally:
        follower.stop()
    assert isinstance(first, msg.Tip) and isinstance(second, msg.Tip)
    assert (first.pointer.version, second.pointer.version) == (1, 2)
    thread.join(30)
    assert not thread.is_alive()
