"""What a device does of staging and hashing gives the bits that the host gives: its phases run on a host here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_rows import row_of

from tests.unit.kernels.on_host import build, needs_compiler
from tests.unit.serving import ctx_blocks as tiles
from tests.unit.serving.fleet import Following
from vllm_delta_sync import kernels, native
from vllm_delta_sync.errors import BaseNeeded, StateHashMismatch
from vllm_delta_sync.kernels import ctx
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import Seed
from vllm_delta_sync.serving import device_hash, device_tiles
from vllm_delta_sync.serving.affine import View, compose
from vllm_delta_sync.serving.device_tiles import DeviceTiles
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.tiles import TileReader
from vllm_delta_sync.wire import dtypes
from vllm_delta_sync.wire.codecs import Context, ctx_of
from vllm_delta_sync.wire.ctx import Sample, make_model
from vllm_delta_sync.wire.tensors import TensorSpec

CPU = torch.device("cpu")
SEED = Seed(2**63 + 5, 77)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> kernels.Backend:
    """A CPU's, with the device's decoder."""

    def decode_tiles(blocks: list[ctx.CodedBlock]) -> list[ctx.Decoded | None]:
        return ctx.decode(library, blocks, 0)

    library = build(tmp_path_factory.mktemp("on-host"))
    return dataclasses.replace(kernels.select("auto", CPU), decode_tiles=decode_tiles)


@needs_compiler
@pytest.mark.parametrize("kept", tiles.KEPT)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("half", [False, True], ids=["all of it", "half of it"])
def test_tiles_are_decoded_against_live_memory_however_it_is_kept(
    backend: kernels.Backend, dim: int, half: bool, kept: str
) -> None:
    block, payload, old, changes = tiles.ctx_block(dim)
    low, size = [0, 0], [tiles.ROWS, tiles.COLUMNS]
    if half:
        low[dim] = size[dim] = size[dim] // 2
    matrix = torch.from_numpy(old.view(np.int16)).view(torch.bfloat16).view(tiles.ROWS, tiles.COLUMNS)
    place = tuple(slice(first, first + count) for first, count in zip(low, size, strict=True))
    live = tiles.KEPT[kept](matrix[place])
    region = tiles.region(live, tuple(low), tuple(size), 0, "F32" if kept == "as fp32" else "BF16")
    memory = LiveMemory([torch.as_strided(live, (live.numel(),), (1,))], backend)
    assert memory.decode_tiles is not None
    reader = DeviceTiles(memory.decode_tiles, [region], memory)
    assert reader.take(block, payload, [0])
    ((found_of, found),) = reader.flush()
    held = np.zeros((tiles.ROWS, tiles.COLUMNS), np.bool_)
    held[place] = True
    mine = held.reshape(-1)[changes.positions]
    assert found_of is block and list(reader.flush()) == []
    np.testing.assert_array_equal(found.positions, changes.positions[mine])
    np.testing.assert_array_equal(found.new_bits(changes.old[mine]), changes.new[mine])


@needs_compiler
@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3", "F16", "I8"])
def test_floats_of_any_width_are_decoded_there_and_integers_left_to_the_host(
    backend: kernels.Backend, dtype: str
) -> None:
    spec = TensorSpec("w", dtype, (40, 50))
    bits = dtypes.by_name(dtype).bits
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, spec.nbytes, np.uint8).view(bits)
    new = np.where(rng.random(old.size) < 0.1, old + bits.type(1), old)
    changes = native.diff(old, new, advance=False)
    model = make_model(lambda: iter([Sample(spec, 0, old, changes, 0)]), 1.0)
    coded = ctx_of(spec, changes, 0, Context(model, old, 0))
    assert coded is not None
    block, payload = row_of(spec, coded)
    live = to_device(old, CPU).view(kernels.dtypes.BY_NAME[dtype])
    region = compose("w", View(0, spec.shape, (50, 1)), View(0, spec.shape, (50, 1)), 0, dtype)
    memory = LiveMemory([live], backend)
    assert memory.decode_tiles is not None
    reader = DeviceTiles(memory.decode_tiles, [region], memory)
    assert reader.take(block, payload, [0]) is (dtype != "I8")
    for _, found in reader.flush():
        on_host = TileReader([region], memory).decode(block, payload, [0])
        np.testing.assert_array_equal(found.positions, changes.positions)
        np.testing.assert_array_equal(found.new_bits(changes.old), changes.new)
        assert found.steps is None and on_host.steps is None


@pytest.mark.parametrize("dim", [0, 1])
def test_where_a_device_has_no_room_to_decode_the_host_does(dim: int) -> None:
    def decode_tiles(blocks: Sequence[ctx.CodedBlock]) -> list[ctx.Decoded | None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    block, payload, old, changes = tiles.ctx_block(dim)
    live = torch.from_numpy(old.view(np.int16)).view(torch.bfloat16).view(tiles.ROWS, tiles.COLUMNS)
    where = tiles.region(live, (0, 0), (tiles.ROWS, tiles.COLUMNS), 0, "BF16")
    reader = DeviceTiles(decode_tiles, [where], LiveMemory([live.view(-1)], kernels.select("auto", CPU)))
    assert reader.take(block, payload, [0])
    ((_, found),) = reader.flush()
    np.testing.assert_array_equal(found.positions, changes.positions)
    np.testing.assert_array_equal(found.new_bits(changes.old), changes.new)


@needs_compiler
def test_old_values_that_are_not_those_of_the_tiles_are_refused_by_name(backend: kernels.Backend) -> None:
    block, payload, old, _ = tiles.ctx_block(0)
    live = torch.from_numpy(np.zeros_like(old).view(np.int16)).view(torch.bfloat16)
    memory = LiveMemory([live], backend)
    where = tiles.region(live.view(tiles.ROWS, tiles.COLUMNS), (0, 0), (tiles.ROWS, tiles.COLUMNS), 0, "BF16")
    assert memory.decode_tiles is not None
    reader = DeviceTiles(memory.decode_tiles, [where], memory)
    reader.take(block, payload, [0])
    with pytest.raises(StateHashMismatch, match=r"block 'w'.*a ctx tile"):
        list(reader.flush())


@needs_compiler
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("together", [1, 1 << 20], ids=["each block in a launch", "all blocks in one"])
def test_ranks_follow_a_log_by_what_their_devices_decode(
    tmp_path: Path, backend: kernels.Backend, ranks: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tiles, "CHANGES", together)
    base = tiles.weights(250)
    states = tiles.publish(tmp_path, dict(base), 3)
    served = Following(tmp_path, base, ranks, padding=64)
    for rank in served.ranks:
        rank._make_backend = lambda device: backend
    served.join()
    for hop in served.deltas():
        served.take(hop)
        assert served.serves(states[hop.to])


@needs_compiler
def test_a_rank_that_holds_a_part_of_a_tile_says_so(tmp_path: Path, backend: kernels.Backend) -> None:
    base = tiles.weights(4098)
    tiles.publish(tmp_path, dict(base), 1)
    served = Following(tmp_path, base, 2, padding=2)  # 2049 rows each, in the midst of a band of 260
    for rank in served.ranks:
        rank._make_backend = lambda device: backend
    served.join()
    with pytest.raises(BaseNeeded, match=r"'embed'.*only a part of its tile"):
        served.follow()
    assert served.serves(base)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    spread=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    span=st.sampled_from([1, 5, 40, 1 << 24]),
    turned=st.booleans(),
)
def test_a_region_hashes_to_the_same_lanes_by_the_kernel_of_contiguous_runs(
    sizes: tuple[int, ...], spread: list[int], span: int, turned: bool
) -> None:
    source, target, strides = [], [], [1, 1]
    for size, gap in zip(reversed(sizes), spread, strict=False):  # in the tensor there are gaps behind each dimension
        source.insert(0, strides[0])
        target.insert(0, strides[1])
        strides = [strides[0] * (size + gap - 1), strides[1] * size]
    order = tuple(reversed(range(len(sizes)))) if turned else tuple(range(len(sizes)))
    live = np.random.default_rng(strides[0]).integers(0, 1 << 16, 3 + strides[1]).astype(np.uint16)
    shape = torch.Size(sizes[i] for i in order)
    places = torch.empty(shape).contiguous().permute(*np.argsort(order).tolist()).stride()
    region = compose("w", View(11, sizes, tuple(source)), View(3, sizes, places), 0, "BF16")
    flat = torch.from_numpy(live.view(np.int16)).view(torch.bfloat16)
    memory = LiveMemory([flat], kernels.select("auto", CPU))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_hash, "SPAN", span)
        found = device_hash.hash_region(flat.view(torch.int16), region, SEED, kernels.select("reference", CPU))
    np.testing.assert_array_equal(found, memory.hash(region, "BF16", SEED))
    assert all(device_hash._span(part) <= max(span, 1) for part in device_hash.parts(region, span))
