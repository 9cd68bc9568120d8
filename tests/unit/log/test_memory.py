"""A follower's memory is bounded by the delta's size, not the model's."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_log

from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.tail import Tail
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec

SPECS = tuple(TensorSpec(f"layers.{n}", "BF16", (2048, 512)) for n in range(8))
MODEL_BYTES = sum(spec.nbytes for spec in SPECS)
SHARE = 0.01
JSON_BYTES = 1 << 20  # room for the largest manifest, whatever the one that is read needs


def model_at(version: int) -> tiny_log.Model:
    rng = np.random.default_rng(0)
    model = {spec.name: (spec, rng.integers(0, 1 << 16, spec.numel, np.uint16)) for spec in SPECS}
    for number in range(1, version + 1):
        rng = np.random.default_rng(number)
        for spec, bits in model.values():
            bits[rng.random(spec.numel) < SHARE] += np.uint16(1)
    return model


def peak(call: Callable[[], object]) -> int:
    """Bytes allocated at most while it runs, above what was there before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny_log.TinyLog, Path]:
    directory = tmp_path_factory.mktemp("large")
    models = [model_at(version) for version in range(3)]
    writer = LogWriter.create(str(directory), tiny_log.lanes_of(models[0]), base=None)
    tiny = tiny_log.TinyLog(directory, directory, writer, models[:1])
    for model in models[1:]:
        tiny.publish(model)
    return tiny, directory


def test_a_tail_holds_no_more_than_a_few_times_what_it_fetches(large: tuple[tiny_log.TinyLog, Path]) -> None:
    tail = Tail(large[0].log, from_base=True)
    taken = peak(tail.look)
    each = tail.fetched / 2
    assert each < MODEL_BYTES / 20
    assert taken < 8 * each + JSON_BYTES


def test_a_hop_takes_a_replica_memory_by_what_changes(large: tuple[tiny_log.TinyLog, Path]) -> None:
    tiny, directory = large
    replica = Replica(DeltaLog.open(directory), tiny.models[0])
    pointer = tiny.log.latest()
    replica.go_to(pointer, 1)  # which copies every tensor: the base is not ours to write to
    hop = replica.route.next_hop(pointer, replica.held, 1, 2)
    assert hop is not None
    assert hop.totals is not None
    taken = peak(lambda: replica.apply(hop))
    assert replica.root == state_hash.state_root(tiny_log.lanes_of(tiny.models[2]))
    assert taken < hop.bytes + 40 * hop.totals.changed
    assert taken < MODEL_BYTES / 2
