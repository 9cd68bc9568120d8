"""Ranks decode ctx blocks against their own memory: whole tiles exactly, and tiles held in part not at all."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.serving.fleet import Following
from tests.unit.serving.served import Served
from vllm_delta_sync import Publisher
from vllm_delta_sync.errors import BaseNeeded, UnsupportedLayout
from vllm_delta_sync.log import FoldSchedule
from vllm_delta_sync.serving.affine import Box, View
from vllm_delta_sync.serving.tiles import fill
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.tensors import TensorSpec


@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple),
    part=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 2)), min_size=4, max_size=4),
    block=st.tuples(st.integers(0, 2000), st.integers(1, 2000)),
)
def test_a_block_is_filled_with_what_a_region_holds_of_it_and_nothing_else(
    shape: tuple[int, ...], part: list[tuple[int, int, int]], block: tuple[int, int]
) -> None:
    tensor = np.arange(1, prod(shape) + 1, dtype=np.uint16).reshape(shape)
    index = tuple(slice(low % n, low % n + size, step) for n, (low, size, step) in zip(shape, part, strict=False))
    held = tensor[index]
    offset = int(held.reshape(-1)[0]) - 1
    try:
        box = Box.of(View(offset, held.shape, tuple(stride // 2 for stride in held.strides)))
    except UnsupportedLayout:
        assume(False)  # no region is like that
    start = block[0] % tensor.size
    count = min(block[1], tensor.size - start)
    old, have = np.zeros(count, np.uint16), np.zeros(count, np.uint8)
    fill(box, np.ascontiguousarray(held).reshape(-1), start, old, have)
    expected = np.zeros_like(tensor)
    expected[index] = held
    np.testing.assert_array_equal(old, expected.reshape(-1)[start : start + count])
    np.testing.assert_array_equal(have, old != 0)


def weights(vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    shapes = {"embed": (vocabulary, 64), "q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128), "bias": (64,)}
    return {name: random(*shape) for name, shape in shapes.items()} | {"norm": random(64), "scale": random()}


def train(state: dict[str, torch.Tensor], seed: int) -> None:
    """Updates of one size, as an optimiser makes them."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        moved = tensor.float() + 2e-5 * torch.randn(tensor.shape, generator=generator)
        state[name] = moved.to(torch.bfloat16)


def by_columns(spec: TensorSpec) -> int:
    """The dimension that the fleet's ranks split."""
    return 1 if spec.name == "o" else 0


def publish(where: Path, state: dict[str, torch.Tensor], steps: int) -> list[dict[str, torch.Tensor]]:
    states = [dict(state)]
    with Publisher.open(where, base=state, folds=None, anchors=None, ctx=by_columns) as publisher:
        for step in range(steps):
            train(state, step)
            publisher.publish(state)
            states.append(dict(state))
    return states


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_follow_a_log_of_ctx_blocks_each_from_its_own_memory(tmp_path: Path, ranks: int) -> None:
    # 250 tokens are padded to 256, so the last band of the vocabulary is held in part, by one rank, with all there is.
    base = weights(250)
    states = publish(tmp_path, dict(base), 4)
    served = Following(tmp_path, base, ranks, padding=64)
    assert CTX in {block.codec for hop in served.deltas() for block in served.log.table(hop).blocks}
    served.join()
    for hop in served.deltas():
        served.take(hop)
        assert served.serves(states[hop.to])


def test_a_rank_that_holds_a_part_of_a_tile_says_so_and_changes_nothing(tmp_path: Path) -> None:
    base = weights(250)
    publish(tmp_path, dict(base), 1)
    served = Following(tmp_path, base, 2, padding=2)  # 125 rows each, in the midst of a band of 16
    served.join()
    with pytest.raises(BaseNeeded, match=r"'embed'.*only a part of its tile"):
        served.follow()
    assert served.serves(base)


def test_a_server_that_holds_parts_of_tiles_goes_by_folds(tmp_path: Path) -> None:
    base = weights(250)
    state, folds = dict(base), FoldSchedule(base=2, levels=1, reach=0)
    with Publisher.open(tmp_path, base=state, folds=folds, anchors=None, ctx=by_columns) as publisher:
        served = Served(tmp_path, base, 2, padding=2)
        for step in range(4):
            train(state, step)
            publisher.publish(state)
            publisher.wait()
            served.look(5.0)
    for _ in range(4):
        served.look(5.0)
    assert served.serves(state) and served.status.served == 4 and 1 not in served.passed
    assert set(served.status.failures) == {"base_needed"}
