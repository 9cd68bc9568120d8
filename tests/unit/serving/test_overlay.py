"""What a checkpoint, or a block that lists more than changed, does to live memory: what differs, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from table_rows import row_of

from tests.unit.serving.test_layout_affine import loader_views, pairs, view_of
from vllm_delta_sync import kernels, native
from vllm_delta_sync.errors import MalformedObject, StagingLimit, UnsupportedLayout
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.serving.affine import Region, View, compose
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.overlay import overlay, slabs
from vllm_delta_sync.serving.staging import Effect, stage
from vllm_delta_sync.serving.stopwatch import Stopwatch
from vllm_delta_sync.wire import container, state_hash
from vllm_delta_sync.wire.codecs import dense_block
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.sparse import gap_abs_block
from vllm_delta_sync.wire.tensors import TensorSpec

ROWS, COLUMNS = 6, 5
SPEC = TensorSpec("w", "BF16", (ROWS, COLUMNS))
# The transpose of columns 1 to 3, as a loader may keep it.
REGION = compose("w", View(1, (3, ROWS), (1, COLUMNS)), View(2, (3, ROWS), (ROWS + 1, 1)), 0, "BF16")
SEEDS = {"w": state_hash.seed(SPEC)}


class Live:
    """One rank's memory with the region in it."""

    def __init__(self, checkpoint: Bits) -> None:
        self.flat = torch.full((40,), -1, dtype=torch.int16)
        for source, target in pairs(REGION):
            self.flat[target] = int(checkpoint[source].astype(np.int16))
        self.memory = LiveMemory([self.flat.view(torch.bfloat16)], kernels.select("auto", torch.device("cpu")))

    def overlay(self, *files: bytes, limit: int = 1 << 20) -> Effect:
        named = [(f"file {number}", data) for number, data in enumerate(files)]
        return overlay(named, {"w": SPEC}, [REGION], {"w": [0]}, SEEDS, self.memory, limit)

    def lanes(self) -> native.types.U32:
        return self.memory.hash(REGION, "BF16", SEEDS["w"])


def file_of(*tensors: tuple[TensorSpec, Bits]) -> bytes:
    head = container.layout([(spec.name, spec.dtype, spec.shape) for spec, _ in tensors], {})
    return head + b"".join(bits.tobytes() for _, bits in tensors)


def bits(seed: int) -> Bits:
    return np.random.default_rng(seed).integers(0, 4, SPEC.numel, dtype=np.uint16)


@given(loader_views(), st.integers(1, 30))
def test_slabs_hold_every_element_once_and_few_at_a_time(views: tuple[torch.Tensor, torch.Tensor], most: int) -> None:
    source, live = views
    try:
        region = compose("t", view_of(source), view_of(live), 0, "BF16")
    except UnsupportedLayout:  # refused by name; test_layout_affine has which
        reject()
    parts = list(slabs(region, most))
    found = [pair for part in parts for pair in sorted(pairs(part))]
    assert len(found) == region.numel and found == sorted(pairs(region))
    assert all(part.numel <= most for part in parts)


@pytest.mark.parametrize("most", [1, 4, 1 << 22])
def test_an_overlay_makes_live_memory_hold_the_checkpoint_and_touches_what_differs(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_delta_sync.serving.overlay.SLAB_ELEMENTS", most)
    before, after = bits(1), bits(2)
    live, wanted = Live(before), Live(after)
    was = live.lanes()
    effect = live.overlay(file_of((TensorSpec("other", "F32", (2,)), np.zeros(2, np.uint32)), (SPEC, after)))
    assert torch.equal(live.flat, Live(before).flat)  # nothing is written yet
    assert effect.elements == sum(int(before[source] != after[source]) for source, _ in pairs(REGION))
    assert np.array_equal(was + effect.lanes[0], wanted.lanes())
    live.memory.scatter(effect.patches)
    assert torch.equal(live.flat, wanted.flat)


def test_a_checkpoint_that_is_served_already_changes_nothing() -> None:
    effect = Live(bits(1)).overlay(file_of((SPEC, bits(1))))
    assert effect.patches == () and effect.regions == ()


OTHER_SHAPE = TensorSpec("w", "BF16", (COLUMNS, ROWS))
OTHER_DTYPE = TensorSpec("w", "F16", (ROWS, COLUMNS))


@pytest.mark.parametrize(
    "files",
    [
        [file_of((OTHER_SHAPE, bits(2)))],
        [file_of((OTHER_DTYPE, bits(2)))],
        [file_of((SPEC, bits(2))), file_of((SPEC, bits(2)))],
        [file_of((SPEC, bits(2)))[:-1]],
        [b"", file_of((SPEC, bits(2)))],
    ],
)
def test_a_checkpoint_that_is_not_the_models_is_refused(files: Sequence[bytes]) -> None:
    with pytest.raises(MalformedObject):
        Live(bits(1)).overlay(*files)


def test_what_differs_may_not_take_more_memory_than_is_allowed() -> None:
    differ = sum(int(bits(1)[source] != bits(2)[source]) for source, _ in pairs(REGION))
    assert Live(bits(1)).overlay(file_of((SPEC, bits(2))), limit=8 * differ).elements == differ
    with pytest.raises(StagingLimit, match="max_staged_bytes"):
        Live(bits(1)).overlay(file_of((SPEC, bits(2))), limit=8 * differ - 1)


@pytest.mark.parametrize(
    "encoded",
    [
        lambda new: dense_block(new, SPEC.numel),
        lambda new: gap_abs_block(np.arange(SPEC.numel, dtype=np.uint32), new),  # of a fold: listed, and back again
    ],
)
def test_of_a_block_that_lists_what_did_not_change_only_what_differs_is_staged(encoded: object) -> None:
    before, after = bits(1), bits(1)
    after[[7, 8, 9, 24]] ^= 1  # of which 24 is in column 4, which is not held here
    made = encoded(after)  # type: ignore[operator]
    assert isinstance(made, EncodedBlock)
    block, payload = row_of(SPEC, made)
    live = Live(before)
    held: list[Region] = [REGION]
    effect = stage([block], [(block, payload)], held, {"w": [0]}, SEEDS, live.memory, 1 << 20)
    assert effect.elements == sum(source in (7, 8, 9) for source, _ in pairs(REGION))
    was = live.lanes()
    live.memory.scatter(effect.patches)
    assert torch.equal(live.flat, Live(after).flat) and np.array_equal(was + effect.lanes[0], live.lanes())


def test_of_a_checkpoint_s_files_only_one_is_held_at_a_time() -> None:
    old = bits(1)
    other = TensorSpec("other", "BF16", (ROWS, COLUMNS))

    def files() -> Iterator[tuple[str, memoryview]]:
        for tensors in ([(SPEC, bits(2)), (other, old)], [(replace(other, name="more"), old)]):
            held = bytearray(file_of(*tensors))
            yield "file", memoryview(held)
            held.clear()  # raises BufferError while anyone can look at it

    live = Live(old)
    effect = overlay(Stopwatch().over(files()), {"w": SPEC}, [REGION], {"w": [0]}, SEEDS, live.memory, 1 << 20)
    assert effect.elements > 0
