"""The phases of the CUDA kernels for ctx and diff, run on a host, give the CPU's bits; no tile is trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.on_host import HostLibrary, build, needs_compiler
from tests.unit.native import test_ctx
from tests.unit.native.ctx_cases import cases, encode, model_of, spread, strips, walk
from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.kernels import ctx, cuda
from vllm_delta_sync.kernels.ctx import CodedBlock
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import Changes, CtxGrid, CtxModel
from vllm_delta_sync.native.ctx_types import GAP_END, GAP_ESCAPE, GAP_SYMBOLS, STEP_ESCAPE, STEP_SYMBOLS
from vllm_delta_sync.native.portable_ctx_stream import Writer

pytestmark = needs_compiler
quick = settings(max_examples=25, deadline=None)
Case = tuple[np.ndarray, np.ndarray, CtxGrid, list[int], int]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    return build(tmp_path_factory.mktemp("on-host"))


def tensor(bits: np.ndarray) -> torch.Tensor:
    return to_device(bits.copy(), torch.device("cpu"))


def coded(old: np.ndarray, changes: Changes, grid: CtxGrid, last: list[int], seed: int) -> CodedBlock:
    model = model_of(native, last, seed)
    return CodedBlock(model, tensor(old), grid, *encode(native, model, old, grid, changes), changes.old.size)


def listed(found: ctx.Decoded | None) -> tuple[list[int], list[int]] | None:
    return None if found is None else (found[0].tolist(), found[1].tolist())


def on_cpu(block: CodedBlock) -> tuple[list[int], list[int]] | None:
    return listed(ctx.decode_on_host(block))


def on_host(library: HostLibrary, *blocks: CodedBlock) -> list[tuple[list[int], list[int]] | None]:
    return [listed(found) for found in ctx.decode(library, blocks, 0)]


def edited(block: CodedBlock, **columns: object) -> CodedBlock:
    return CodedBlock(**{**vars(block), **columns})


@quick
@given(case=cases())
def test_any_block_decodes_to_what_the_cpu_decodes_it_to(library: HostLibrary, case: Case) -> None:
    old, new, grid, last, seed = case
    block = coded(old, native.diff(old.copy(), new, advance=False), grid, last, seed)
    wanted = on_cpu(block)
    assert wanted is not None and on_host(library, block) == [wanted]
    with library.backwards():
        assert on_host(library, block) == [wanted]


@quick
@given(case=cases(), data=st.data())
def test_damaged_tiles_are_refused_exactly_where_the_cpu_refuses_them(
    library: HostLibrary, case: Case, data: st.DataObject
) -> None:
    old, new, grid, last, seed = case
    block = coded(old, native.diff(old.copy(), new, advance=False), grid, last, seed)
    stream = block.data.copy()
    for _ in range(data.draw(st.integers(1, 4)) if stream.size else 0):
        stream[data.draw(st.integers(0, stream.size - 1))] ^= data.draw(st.integers(1, 255))
    stated = block.stated ^ data.draw(st.integers(0, 1))
    damaged = edited(block, data=stream, stated=stated, changed=old.size)
    assert on_host(library, damaged) == [on_cpu(damaged)]


@pytest.mark.parametrize("share", [0.01, 0.6], ids=["one state", "four states and many chunks"])
def test_tiles_of_the_largest_size_and_rows_of_any_alignment(library: HostLibrary, share: float) -> None:
    rng = np.random.default_rng(7)
    grid = CtxGrid(5, 70_001, strips(65_539, 4_462))
    old = (rng.normal(0, 1e-2, grid.elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    step = rng.integers(1, 400, old.size).astype(np.uint16)
    new = np.where(rng.random(old.size) < share, old + step, old).astype(np.uint16)
    block = coded(old, native.diff(old.copy(), new, advance=False), grid, [100, 113, 116, 118, 119, 255], 1)
    assert set((block.stated & 1).tolist()) == {int(share > 0.1)}
    assert on_host(library, block) == [on_cpu(block)]
    moved = torch.empty(old.size + 1, dtype=torch.int16)[1:].copy_(block.old)  # two bytes off
    assert on_host(library, edited(block, old=moved)) == [on_cpu(block)]


def test_many_blocks_decode_in_one_launch_and_a_damaged_one_harms_no_other(library: HostLibrary) -> None:
    blocks = []
    for seed in range(4):
        old, changes = walk(seed, 10, 64)
        blocks.append(coded(old, changes, CtxGrid(10, 64, strips(32, 32)), [115, 255][seed % 2 :], seed))
    data = blocks[1].data.copy()
    data[:4] = 0  # a state below the least there is
    blocks[1] = edited(blocks[1], data=data)
    wanted = [on_cpu(block) for block in blocks]
    assert [index for index, one in enumerate(wanted) if one is None] == [1]
    assert on_host(library, *blocks) == wanted


def test_only_wanted_tiles_are_decoded_and_old_values_elsewhere_do_not_matter(library: HostLibrary) -> None:
    old, changes = walk(5, 10, 64)
    block = coded(old, changes, CtxGrid(10, 64, strips(32, 32)), [115, 255], 1)
    block.old.view(10, 64)[:, 32:] = 0
    block = edited(block, wanted=np.array([1, 0], np.uint8))
    found = on_host(library, block)[0]
    assert found == on_cpu(block)
    assert found is not None and all(position % 64 < 32 for position in found[0]) and found[0]


def test_more_changes_than_stated_are_refused_and_none_is_written_beyond_the_room(library: HostLibrary) -> None:
    old, changes = walk(2, 10, 64)
    block = coded(old, changes, CtxGrid(10, 64, strips(32, 32)), [255], 1)
    room = changes.old.size - 1
    tiles, jobs, models = ctx._tables([edited(block, changed=room)])
    tiles[:, 6] += block.data.ctypes.data
    positions = np.full(room + 64, 0xABABABAB, np.uint32)
    values, outcome = np.full(room + 64, 0xABAB, np.uint16), np.zeros((1, 2), np.uint32)
    addresses = [column.ctypes.data for column in (models, positions, values, outcome)]
    library.ctx_decode(2, tiles.ctypes.data, len(tiles), jobs.ctypes.data, 1, *addresses, 0)
    assert outcome[0, 1] and (positions[room:] == 0xABABABAB).all() and (values[room:] == 0xABAB).all()
    assert on_host(library, edited(block, changed=room)) == [None]


class OnHost:
    """The host's encoder with the device's decoder, as `test_ctx` wants an implementation."""

    def __init__(self, library: HostLibrary) -> None:
        self.library, self.ctx_model = library, native.ctx_model
        self.ctx_encode, self.ctx_index = native.ctx_encode, native.ctx_index

    def ctx_decode(self, model: CtxModel, old: np.ndarray, *rest: object) -> tuple[np.ndarray, np.ndarray]:
        (found,) = ctx.decode(self.library, [CodedBlock(model, tensor(old), *rest)], 0)
        if found is None:
            raise MalformedObject("refused")
        return found


TILES = ["00 84 00 01 00", "00 84 00 01 00 00", "00 84 00", "00 84 00 00", "00 84 00 02"]


def test_what_is_said_of_single_tiles_holds_for_the_device_too(library: HostLibrary) -> None:
    of = OnHost(library)
    test_ctx.test_the_bytes_are_those_of_the_protocol(of)
    test_ctx.test_a_rank_beyond_the_last_member_is_refused(of)
    test_ctx.test_bits_that_fill_the_last_byte_are_zero(of)
    for tile in TILES:
        test_ctx.test_a_tile_with_a_byte_too_many_or_too_few_or_another_end_is_refused(of, tile)
    for cut in (0, 1, -1):
        test_ctx.test_every_byte_of_a_tile_counts(of, cut)


def single(data: bytes, model: CtxModel) -> CodedBlock:
    """A tile of four elements."""
    grid, stated = CtxGrid(1, 4, strips(4)), np.array([len(data) << 1])
    return CodedBlock(model, tensor(test_ctx.WORKED), grid, stated, np.frombuffer(data, np.uint8), 4)


@pytest.mark.parametrize(("symbol", "bits", "sound"), [(119, 12, True), (120, 13, False)])
def test_a_step_of_half_the_numbers_that_there_are_or_more_is_refused(
    library: HostLibrary, symbol: int, bits: int, sound: bool
) -> None:
    gaps = spread(GAP_SYMBOLS, {0: 1024, GAP_END: 1024, GAP_ESCAPE: 1024})
    steps = spread(STEP_SYMBOLS, {119: 1024, 120: 1024, STEP_ESCAPE: 1024})
    writer = Writer(1)
    writer.add(gaps, 0, 0)
    writer.add(gaps, GAP_END, 1)
    writer.add(steps, symbol, 0)
    writer.raw(0, bits)
    block = single(writer.bytes(), native.ctx_model(np.array([255], np.uint8), gaps[None], steps[None]))
    assert on_host(library, block) == [on_cpu(block)] and (on_cpu(block) is not None) == sound


def test_a_tile_that_changes_nothing_is_refused(library: HostLibrary) -> None:
    model = test_ctx.worked_model(native)
    writer = Writer(1)
    writer.add(model.gaps[0], GAP_END, 0)
    assert on_host(library, single(writer.bytes(), model)) == [None]


def test_a_state_that_begins_too_low_is_refused_though_it_would_come_to_the_end(library: HostLibrary) -> None:
    model = test_ctx.worked_model(native)
    writer = Writer(1)
    for symbol in (0, GAP_END):
        writer.add(model.gaps[0], symbol, 0)
    for _ in range(2):
        writer.add(model.steps[0], 0, 0)
    behind = int.from_bytes(writer.bytes(), "little")  # the state once a gap of 1 was read
    assert len(writer.bytes()) == 4 and behind >> 16 < 1024
    low = 1024 + (
        behind >> 16
    )  # a gap of 1 has slots 1024 to 2047; it leaves the upper half, and a word brings the lower
    block = single(low.to_bytes(4, "little") + (behind & 0xFFFF).to_bytes(2, "little"), model)
    assert on_host(library, block) == [on_cpu(block)] == [None]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@quick
@given(
    n=st.one_of(st.integers(0, 100), st.integers(8100, 8300), st.just(40_000)),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    offset=st.integers(0, 3),
    advance=st.booleans(),
    backwards=st.booleans(),
)
def test_a_diff_finds_what_the_cpu_finds_in_its_order(
    library: HostLibrary, width: int, n: int, share: float, offset: int, advance: bool, backwards: bool
) -> None:
    rng = np.random.default_rng(n)
    before = rng.integers(0, 256, (n + offset) * width, np.uint8).view(f"u{width}")
    after = np.where(
        rng.random(n + offset) < share, before ^ np.asarray(1 << rng.integers(0, 8 * width), before.dtype), before
    )
    live, now = tensor(before)[offset:], tensor(after)[offset:]
    wanted = native.diff(before[offset:].copy(), after[offset:].copy(), advance=False)
    if backwards:
        with library.backwards():
            found = cuda.diff(library, live, now, advance, 0)
    else:
        found = cuda.diff(library, live, now, advance, 0)
    for column, one in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(column, one.numpy().view(f"u{one.element_size()}"))
    assert torch.equal(live, now if advance else tensor(before)[offset:])
