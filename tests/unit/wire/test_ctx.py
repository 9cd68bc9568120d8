"""Blocks of the ctx codec: cut so that ranks read theirs alone, sound through a table, and refused where they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_rows import row_of

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseNeeded, MalformedObject
from vllm_delta_sync.native.ctx_types import GAP_END, GAP_ESCAPE, TILE_ELEMENTS
from vllm_delta_sync.wire import codec_rules, columns, ctx, ctx_model, ctx_tiles, frames
from vllm_delta_sync.wire.codecs import Context, check_block, ctx_header, decode_block, decode_tiles, encode_block
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks

SPEC = TensorSpec("w", "BF16", (192, 320))


def step(seed: int, spec: TensorSpec = SPEC, rate: float = 2e-5) -> tuple[np.ndarray, np.ndarray]:
    """Weights and what a small update makes of them."""
    rng = np.random.default_rng(seed)
    master = rng.normal(0, 0.02, spec.numel).astype(np.float32)
    moved = master + rng.normal(0, rate, spec.numel).astype(np.float32)
    return tuple((bits.view(np.uint32) >> 16).astype(np.uint16) for bits in (master, moved))  # type: ignore[return-value]


def coded(old: np.ndarray, new: np.ndarray, dim: int = 0, spec: TensorSpec = SPEC) -> EncodedBlock:
    changes = native.diff(old.copy(), new, advance=False)
    model = ctx.make_model(lambda: iter([ctx.Sample(spec, 0, old, changes, dim)]), 1.0)
    return encode_block(spec, changes, 0, old.size, new, Context(model, old, dim))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_block_goes_through_a_table_and_back(dim: int, dtype: str) -> None:
    spec = replace(SPEC, dtype=dtype)
    old, new = step(1, spec)
    encoded = coded(old, new, dim, spec)
    assert encoded.codec == codec_rules.CTX
    block, payload = row_of(spec, encoded)
    read = VersionTable.from_bytes(VersionTable((spec,), np.zeros((1, 4), np.uint32), (block,)).to_bytes()).blocks[0]
    check_block(read, payload)
    decoded = decode_block(read, payload, old)
    out = old.copy()
    out[decoded.positions] = decoded.new_bits(old[decoded.positions])
    np.testing.assert_array_equal(out, new)


def test_it_is_smaller_than_gaps_by_far_on_weights_and_never_larger_elsewhere() -> None:
    old, new = step(2)
    changes = native.diff(old.copy(), new, advance=False)
    assert coded(old, new).stored < 0.75 * encode_block(SPEC, changes, 0, old.size, new).stored
    rows = old.reshape(SPEC.shape).copy()
    # The same columns in every row: a general compressor sees that, statistics do not.
    rows[:, np.random.default_rng(2).random(320) < 0.1] += np.uint16(1)
    assert coded(old, rows.reshape(-1)).codec == codec_rules.GAP
    noise = np.random.default_rng(3).integers(0, 1 << 16, old.size).astype(np.uint16)
    assert coded(old, noise).codec == codec_rules.DENSE


def test_without_the_old_values_it_says_what_it_needs() -> None:
    with pytest.raises(BaseNeeded, match="'w'"):
        decode_block(*row_of(SPEC, coded(*step(3))))


def test_wrong_old_values_are_refused_or_change_other_elements() -> None:
    old, new = step(4)
    block, payload = row_of(SPEC, coded(old, new))
    try:
        decoded = decode_block(block, payload, np.roll(old, 1))
    except MalformedObject:
        return
    changed = np.flatnonzero(old != new)
    assert not np.array_equal(decoded.positions, changed)


@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (1, 2), (0, 16), (1, 4)])
def test_a_rank_decodes_its_tiles_without_the_others_memory(dim: int, ranks: int) -> None:
    old, new = step(5)
    encoded = coded(old, new, dim)
    block, payload = row_of(SPEC, encoded)
    header = ctx_header(SPEC, 0, SPEC.numel, encoded, "w")
    boxes = header.grid.boxes
    whole, seen = decode_block(block, payload, old), []
    for rank in range(ranks):
        held = np.zeros(SPEC.shape, np.bool_)
        size = SPEC.shape[dim] // ranks
        held[(slice(None),) * dim + (slice(rank * size, (rank + 1) * size),)] = True
        flat = held.reshape(header.grid.rows, header.grid.row_length)
        wanted = np.array([flat[r : r + h, c : c + w].all() for r, h, c, w in boxes.tolist()], np.uint8)
        touched = np.array([flat[r : r + h, c : c + w].any() for r, h, c, w in boxes.tolist()], np.uint8)
        assert np.array_equal(wanted, touched), "a tile crosses the split"
        live = np.where(held.reshape(-1), old, 0xFFFF).astype(np.uint16)
        seen.append(decode_tiles(header, encoded, live, wanted, "w").positions)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), whole.positions)


def test_bands_end_where_ranks_split_a_padded_vocabulary() -> None:
    vocabulary, hidden = 50257, 96
    padded = -(-vocabulary // 64) * 64
    spec = TensorSpec("embed", "BF16", (vocabulary, hidden))
    edges = {padded // 16 * rank * hidden for rank in range(1, 16)}
    found = set[int]()
    for start, count in split_blocks(spec):
        grid = ctx_tiles.grid(spec.shape, start, count, 0, ctx_tiles.band_of(vocabulary, hidden))
        assert grid.rows == 1 and int(grid.strips[:, 1].sum()) == count
        found |= {start + int(column) for column in grid.strips[:, 0]}
    assert edges <= found


@pytest.mark.parametrize("inner", [1, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("size", [24, 80, 100, 576, 1000, 4096, 8960, 11008, 128256])
def test_bands_end_wherever_ranks_split_a_dimension_evenly(size: int, inner: int) -> None:
    band = ctx_tiles.band_of(size, inner)
    assert all(size // ranks % band == 0 for ranks in (2, 4, 8, 16) if size % ranks == 0)


@pytest.mark.parametrize(
    ("size", "inner", "band"),
    [
        (576, 576, 36),  # smaller than a tile
        (9216, 3072, 64),  # q, k and v of 32 heads of 96 each
        (49152, 576, 256),
        (11008, 4096, 43),  # 16 would be a quarter of a tile
        (128, 1 << 19, 1),  # whole experts
    ],
)
def test_what_is_larger_than_a_tile_is_cut_where_heads_end(size: int, inner: int, band: int) -> None:
    assert ctx_tiles.band_of(size, inner) == band


@given(
    shape=st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple),
    band=st.integers(1, 50),
    pick=st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(1, 5000)),
)
def test_tiles_cover_a_block_once_and_stay_in_their_band(
    shape: tuple[int, ...], band: int, pick: tuple[int, int, int]
) -> None:
    total = int(np.prod(shape, dtype=np.int64))
    dim, start = pick[0] % max(1, len(shape)), pick[1] % total
    count = min(pick[2], total - start)
    try:
        grid = ctx_tiles.grid(shape, start, count, dim, band)
    except MalformedObject:
        length = int(np.prod(shape[dim:], dtype=np.int64))
        assert start % length + count > length and (start % length or count % length)
        return
    length, inner = int(np.prod(shape[dim:], dtype=np.int64)), int(np.prod(shape[dim + 1 :], dtype=np.int64))
    index = np.arange(start, start + count).reshape(grid.rows, grid.row_length)
    seen = []
    for first, height, column, width in grid.boxes.tolist():
        tile = index[first : first + height, column : column + width]
        assert 0 < tile.size <= TILE_ELEMENTS
        assert np.unique(tile % length // inner // band).size == 1
        seen.append(tile.reshape(-1))
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(start, start + count))


@pytest.mark.parametrize(
    ("dim", "band", "start", "count"),
    [(2, 1, 0, 10), (0, 0, 0, 10), (1, 16, 5, 640), (1, 16, 0, 500), (0, 1, 0, 192 * 320)],
    ids=["no such dimension", "no band", "not at a row", "not whole rows", "sound"],
)
def test_tiles_that_cannot_be_are_refused(dim: int, band: int, start: int, count: int) -> None:
    if count == SPEC.numel:
        assert ctx_tiles.grid(SPEC.shape, start, count, dim, band).tiles == 192
        return
    with pytest.raises(MalformedObject):
        ctx_tiles.grid(SPEC.shape, start, count, dim, band)


def test_a_grid_of_too_many_tiles_is_refused_before_it_is_made() -> None:
    with pytest.raises(MalformedObject, match="bands of 1 has more than 4096 tiles"):
        ctx_tiles.grid((1 << 24,), 0, 1 << 24, 0, 1)
    with pytest.raises(MalformedObject, match="tiles"):
        ctx_tiles.grid((1 << 11, 1 << 13), 0, 1 << 24, 1, 1)


HEADERS = {
    "empty": b"",
    "without a band": b"\x00",
    "of another number of tiles": b"\x00\x0c\x08",
    "cut off in a number": b"\x00\x0c" + b"\x00" * 15 + b"\x80",
    "with a number out of range": b"\x00" + b"\xff" * 4 + b"\x01",
    "of tiles that are not the data's": b"\x00\x0c" + b"\x04" * 16,
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_index_stream_that_lies_is_refused(name: str) -> None:
    with pytest.raises(MalformedObject):
        ctx.read_header(SPEC, 0, SPEC.numel, HEADERS[name], 100)


def test_rows_that_lie_about_a_ctx_block_are_refused() -> None:
    block, _ = row_of(SPEC, coded(*step(6)))
    table = VersionTable((SPEC,), np.zeros((1, 4), np.uint32), (block,))
    raw = frames.decompress(data := table.to_bytes(), frames.content_size(data, "t"), "t")
    sound = columns.unpack(raw, "t")
    lies = {
        "names a model": {"blocks.model": np.array([1], np.uint8)},
        "its streams": {"blocks.raw": sound["blocks.raw"] + 1},
        "classes": {"models.classes": sound["models.classes"] + 1},
        "frequencies do not add up": {"models.gaps": np.roll(sound["models.gaps"], 1) + 1},
        "ctx is for elements": {"tensors.dtype": np.array([9], np.uint8)},
    }
    assert VersionTable.from_bytes(frames.compress(columns.pack(sound))).blocks[0].model is not None
    for why, forged in lies.items():
        with pytest.raises(MalformedObject, match=why):
            VersionTable.from_bytes(frames.compress(columns.pack({**sound, **forged})))


def test_a_table_without_ctx_blocks_has_no_models() -> None:
    data = VersionTable((SPEC,), np.zeros((1, 4), np.uint32), ()).to_bytes()
    raw = frames.decompress(data, frames.content_size(data, "t"), "t")
    assert b"models." not in raw and b"blocks.model" not in raw


def test_classes_join_contexts_that_change_alike_and_are_seven_at_most() -> None:
    members, steps = np.zeros(256, np.int64), np.zeros((256, 249), np.int64)
    members[100:140] = 10_000
    steps[100:120, 0], steps[120:140, 0] = 1000, 10
    assert ctx_model.classes(members, steps, toll=100.0).tolist() == [119, 255]
    steps[100:140, 0] = 2 ** (np.arange(40) // 4)
    assert ctx_model.classes(members, steps, toll=-1e9).size == ctx_model.MAX_MADE
    assert ctx_model.classes(np.zeros(256, np.int64), np.zeros((256, 249), np.int64), toll=1.0).tolist() == [255]


@given(st.lists(st.integers(0, 10**6), min_size=74, max_size=74))
def test_frequencies_add_up_and_leave_nothing_out_that_was_seen(counts: list[int]) -> None:
    found = ctx_model.frequencies(np.array([counts]), GAP_END, GAP_ESCAPE)[0]
    assert int(found.sum()) == 4096 and found[GAP_ESCAPE] >= 1 and found[GAP_END] >= 1
    assert all(frequency >= 1 for frequency, count in zip(found.tolist(), counts, strict=True) if count)
