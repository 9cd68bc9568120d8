"""What following takes of a device is set aside before the KV cache is sized, and is all that a step may take there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.kernels.on_host import build, needs_compiler
from tests.unit.serving.fleet import Following, publish, weights
from tests.unit.serving.test_attached import Core, work
from vllm_delta_sync import kernels
from vllm_delta_sync.errors import ConfigError, StateError
from vllm_delta_sync.kernels import ctx
from vllm_delta_sync.kernels.arena import ALIGNED
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import Seed
from vllm_delta_sync.serving import attached, engine, reserve
from vllm_delta_sync.serving.memory import LiveMemory, Patch
from vllm_delta_sync.serving.rank import Rank
from vllm_delta_sync.serving.reserve import LEAST, WORK_BYTES, Reserve, staged_bytes

CPU, META = torch.device("cpu"), torch.device("meta")  # a device that has any room, and none
GIB = 1 << 30


@pytest.mark.parametrize(
    ("weights_bytes", "wanted", "most", "found"),
    [
        (16 * GIB, None, 8 * GIB, GIB),
        (16 * GIB, None, GIB // 2, GIB // 2),
        (16 * GIB, 3 * GIB, 8 * GIB, 3 * GIB),
        (16 * GIB, 9 * GIB, 8 * GIB, 8 * GIB),
        (1000, None, 8 * GIB, LEAST),
    ],
)
def test_an_arena_takes_what_the_settings_say_or_a_share_of_the_weights(
    weights_bytes: int, wanted: int | None, most: int, found: int
) -> None:
    assert staged_bytes(weights_bytes, wanted, most) == found


def test_a_device_gives_the_arena_for_good_and_room_to_work_in_until_the_kv_cache_is_sized() -> None:
    launched = []

    def write(patch: kernels.Prepared) -> torch.Tensor:
        launched.append((patch.width, patch.elements))
        return torch.tensor(-1)

    def state_hash(bits: torch.Tensor, start: int, seed: Seed) -> torch.Tensor:
        launched.append((bits.element_size(), -1))
        return torch.zeros(4)

    backend = dataclasses.replace(kernels.select("auto", META), write=write, state_hash=state_hash)
    rank = Rank(0, lambda device: backend, 1 << 30, None)
    model = torch.nn.ModuleList([torch.nn.Linear(4096, 4096, bias=False), torch.nn.Linear(8, 8, dtype=torch.bfloat16)])
    size = sum(weight.nbytes for weight in model.parameters())
    held = rank.set_aside(model)
    assert held.nbytes == size // reserve.SHARE + WORK_BYTES
    assert rank.set_aside(model) is held
    assert launched == [(2, 1), (2, -1), (4, 1), (4, -1)], (
        "kernels of the widths there are, once, before anything waits"
    )
    held.open_work()
    assert held.nbytes == size // reserve.SHARE


@needs_compiler
def test_decoding_is_launched_before_anything_waits_too(tmp_path: Path) -> None:
    library, launched = build(tmp_path), []

    def decode_tiles(blocks: Sequence[kernels.CodedBlock]) -> list[kernels.Decoded | None]:
        found = ctx.decode(library, blocks, 0)
        launched.extend(block.old.element_size() for block in blocks)
        return found

    backend = dataclasses.replace(kernels.select("auto", CPU), decode_tiles=decode_tiles)
    for width in (1, 2, 4, 8):
        reserve._rehearse(backend, kernels.Arena(4096, CPU), width)
    assert launched == [1, 2, 4], "ctx has no elements of eight bytes"


def test_nothing_is_set_aside_of_a_cpu() -> None:
    held = Rank(0, lambda device: kernels.select("auto", device), 1 << 30, None).set_aside(torch.nn.Linear(8, 8))
    assert held.nbytes == 0 and held.arena is None


def test_a_device_without_room_stops_the_start_and_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(nbytes: int, device: torch.device) -> kernels.Arena:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "Arena", full)
    with pytest.raises(ConfigError, match=r"no room for the \d+ bytes that updates take there; lower device_staged"):
        Reserve(kernels.select("auto", META), 1 << 20)


def with_arenas(served: Following, nbytes: int) -> list[kernels.Arena]:
    """Ranks that stage as those of a GPU do."""
    arenas = []
    for rank in served.ranks:
        assert rank.memory is not None
        rank.memory._arena = kernels.Arena(nbytes, CPU)
        arenas.append(rank.memory._arena)
    return arenas


@pytest.mark.parametrize("room", [1 << 20, 512], ids=["all in the arena", "most in pinned memory"])
def test_ranks_follow_and_go_back_by_what_lies_in_their_arenas(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.backend, "pinned", lambda host: to_device(host, CPU))  # no GPU, nothing to pin for
    states = publish(tmp_path, weights(), steps=3)
    served = Following(tmp_path, states[0])
    served.join()
    arenas = with_arenas(served, room)
    for hop in served.deltas():
        served.take(hop)
        assert served.serves(states[hop.to])
    assert [arena.turn for arena in arenas] == [3, 3] and all(arena._used > 0 for arena in arenas)
    for rank in served.ranks:
        rank.rollback(3)
    assert served.serves(states[2])


@pytest.mark.parametrize("segments", [1, 20])
def test_a_change_takes_eight_bytes_of_an_arena_and_its_segment_thirty_two(segments: int) -> None:
    count, arena = 1000 * segments, kernels.Arena(1 << 20, CPU)
    memory = LiveMemory([torch.zeros(count, dtype=torch.bfloat16)], kernels.select("auto", CPU), arena)
    ends = np.arange(0, count + 1, 1000)
    rows = np.stack([np.zeros(segments, np.int64), ends[:-1], ends[:-1], ends[1:]], axis=1)
    zeros = np.zeros(count, np.uint16)
    (prepared,) = memory.prepare({2: Patch(rows, np.tile(np.arange(1000, dtype=np.uint32), segments), zeros, zeros)})
    columns = (prepared.places, prepared.offsets, prepared.expected, prepared.values)
    assert sum(column.nbytes for column in columns) == 8 * count + 32 * segments
    assert arena._used < 8 * count + 32 * segments + 3 * ALIGNED


def patch(value: int) -> Patch:
    """Element 1 goes from 0 to `value`."""
    column = np.array([value], np.uint16)
    return Patch(np.array([[0, 0, 0, 1]]), np.ones(1, np.uint32), np.zeros_like(column), column)


def test_a_step_in_whose_place_another_was_staged_is_neither_written_nor_taken_back() -> None:
    live = torch.zeros(3, dtype=torch.bfloat16)
    memory = LiveMemory([live], kernels.select("auto", CPU), kernels.Arena(4096, CPU))
    old = memory.prepare({2: patch(7)})
    new = memory.prepare({2: patch(9)})
    for gone in (old, [old[0].reversed()]):
        with pytest.raises(StateError, match="another step was staged where this one was; nothing was written"):
            memory.scatter(gone)
    assert live.view(torch.int16).tolist() == [0, 0, 0]
    memory.scatter(new)
    assert live.view(torch.int16).tolist() == [0, 9, 0]


class Recording:
    """What an engine core carries, as far as its start goes."""

    def __init__(self, core: Any) -> None:
        self.seen: list[str] = core.seen
        self.ops = self

    def reserve(self) -> None:
        self.seen.append("reserve")

    def start(self) -> None:
        self.seen.append("start")

    def stop(self) -> None:
        self.seen.append("stop")


@pytest.mark.parametrize(
    ("fails", "order"),
    [(False, ["reserve", "size the cache", "start"]), (True, ["reserve", "size the cache", "stop"])],
)
def test_ranks_reserve_before_the_kv_cache_is_sized(
    fails: bool, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def size(core: Any) -> str:
        core.seen.append("size the cache")
        if fails:
            raise MemoryError
        return "sized"

    monkeypatch.setattr(attached, "Attached", Recording)
    parallel = SimpleNamespace(worker_extension_cls=engine.EXTENSIONS[0])
    core = SimpleNamespace(seen=[], vllm_config=SimpleNamespace(parallel_config=parallel))
    started = engine._attach_around(size)
    if fails:
        with pytest.raises(MemoryError):
            started(core)
    else:
        assert started(core) == "sized" and engine.attached(core) is not None
    assert core.seen == order


def test_a_rank_without_room_ends_the_start_of_the_engine() -> None:
    told = {"ok": False, "cause": "config", "text": "no room"}
    with pytest.raises(ConfigError, match="rank 1: no room"):
        work(Core(delta_sync_reserve=[{"ok": True, "bytes": 5}, told])).reserve()
