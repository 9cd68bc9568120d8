"""What staging takes in memory, and that it stages the same however many changes it looks at at a time."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from table_rows import row_of

from vllm_delta_sync import kernels, native
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.serving import staging
from vllm_delta_sync.serving.affine import Region, View, compose
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.staging import Effect, stage
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.codecs import dense_block
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.sparse import gap_abs_block, gap_of
from vllm_delta_sync.wire.tensors import TensorSpec

BLOCKS, COUNT = 16, 1 << 16
SPEC = TensorSpec("w", "BF16", (BLOCKS, COUNT))
SEED = state_hash.seed(SPEC)
WHOLE = compose("w", View(0, SPEC.shape, (COUNT, 1)), View(0, SPEC.shape, (COUNT, 1)), 0, "BF16")
HALF = compose(
    "w", View(0, (BLOCKS, COUNT // 2), (COUNT, 1)), View(0, (BLOCKS, COUNT // 2), (COUNT // 2, 1)), 0, "BF16"
)


def step() -> tuple[Bits, Bits]:
    """The tensor before and after: every second element changes."""
    old = np.random.default_rng(0).integers(0, 1 << 16, SPEC.numel, dtype=np.uint16)
    new = old.copy()
    new[::2] ^= 1
    return old, new


def encoded(old: Bits, new: Bits) -> list[EncodedBlock]:
    """A row of the tensor a block, in turns as steps, as values and whole."""
    made = []
    for number, at in enumerate(range(0, SPEC.numel, COUNT)):
        before, after = old[at : at + COUNT], new[at : at + COUNT]
        changes = native.diff(before, after, advance=False)
        ways = (
            lambda c=changes: gap_of(c),
            lambda c=changes: gap_abs_block(c.positions, c.new),
            lambda c=changes, bits=after: dense_block(bits, c.positions.size),
        )
        made.append(ways[number % 3]())
    return made


def staged(region: Region, live: Bits, blocks: list[EncodedBlock]) -> tuple[Effect, LiveMemory]:
    flat = torch.from_numpy(live.view(np.int16)).view(torch.bfloat16)
    memory = LiveMemory([flat], kernels.select("auto", flat.device))
    pairs = [row_of(SPEC, made, n * COUNT, COUNT) for n, made in enumerate(blocks)]
    tracemalloc.reset_peak()
    return stage([row for row, _ in pairs], pairs, [region], {"w": [0]}, {"w": SEED}, memory, 8 * SPEC.numel), memory


def test_changes_take_eight_bytes_each_while_they_are_staged_and_one_block_more() -> None:
    old, new = step()
    blocks = encoded(old, new)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        effect, _ = staged(WHOLE, old, blocks)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    listed = sum(COUNT if made.codec == 0 else made.changed for made in blocks)  # a dense block may change all it lists
    payload = sum(made.stored for made in blocks)
    assert effect.elements == SPEC.numel // 2
    assert peak - before - payload < 8 * listed + 32 * COUNT


@pytest.mark.parametrize("region", [WHOLE, HALF])
@pytest.mark.parametrize("at_once", [1000, 1 << 17])
def test_what_is_staged_does_not_depend_on_how_many_changes_are_looked_at_at_a_time(
    region: Region, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "AT_ONCE", at_once)
    old, new = (bits.reshape(SPEC.shape)[:, : region.numel // BLOCKS].reshape(-1).copy() for bits in step())
    effect, memory = staged(region, old, encoded(*step()))
    (patch,) = effect.patches
    assert len(patch.places) == 1  # one region is one segment, or the kernel cannot read ahead
    was = memory.hash(region, "BF16", SEED)
    memory.scatter(effect.patches)
    assert np.array_equal(old, new) and np.array_equal(was + effect.lanes[0], memory.hash(region, "BF16", SEED))
