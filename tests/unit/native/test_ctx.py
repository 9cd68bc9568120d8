"""The ctx codec's loops: what goes in comes out, both implementations write the same bytes, and no input is trusted."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.native.ctx_cases import cases, encode, implementations, model_of, spread, strips, walk
from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native import Changes, CtxGrid, CtxModel, portable_ctx
from vllm_delta_sync.native.ctx_types import GAP_END, GAP_ESCAPE, GAP_SYMBOLS, STEP_ESCAPE, STEP_SYMBOLS, TOTAL

quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=implementations(), ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def ctx(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@quick
@given(case=cases())
def test_any_change_of_any_bits_comes_out_as_it_went_in(
    ctx: ModuleType, case: tuple[np.ndarray, np.ndarray, CtxGrid, list[int], int]
) -> None:
    old, new, grid, last, seed = case
    changes = native.diff(old.copy(), new, advance=False)
    model = model_of(ctx, last, seed)
    coded = encode(ctx, model, old, grid, changes)
    positions, values = ctx.ctx_decode(model, old, grid, *coded, changes.positions.size)
    np.testing.assert_array_equal(positions, changes.positions)
    np.testing.assert_array_equal(values, changes.new)


@quick
@given(case=cases())
def test_both_implementations_write_the_same_bytes(
    case: tuple[np.ndarray, np.ndarray, CtxGrid, list[int], int],
) -> None:
    old, new, grid, last, seed = case
    changes = native.diff(old.copy(), new, advance=False)
    written = [ctx.ctx_encode(model_of(ctx, last, seed), old, grid, changes, 1 << 20) for ctx in implementations()]
    counted = []
    for ctx in implementations():
        classes, contexts = native.Tally.of_classes(len(last)), native.Tally.of_contexts()
        ctx.ctx_tally(model_of(ctx, last, seed), old, grid, changes, classes)
        ctx.ctx_survey(old, changes.old, changes.new, contexts)
        counted.append([column.tolist() for column in (*classes, *contexts)])
    assert written[0] == written[-1]
    assert counted[0] == counted[-1]


@quick
@given(case=cases(), data=st.data())
def test_damaged_bytes_are_refused_or_lead_inside_the_block_and_both_implementations_agree(
    case: tuple[np.ndarray, np.ndarray, CtxGrid, list[int], int], data: st.DataObject
) -> None:
    old, new, grid, last, seed = case
    changes = native.diff(old.copy(), new, advance=False)
    outcomes = []
    stated, stream = encode(portable_ctx, model_of(portable_ctx, last, seed), old, grid, changes)
    stream = stream.copy()
    for _ in range(data.draw(st.integers(1, 4)) if stream.size else 0):
        stream[data.draw(st.integers(0, stream.size - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        stated = stated ^ 1
    for ctx in implementations():
        try:
            found = ctx.ctx_decode(model_of(ctx, last, seed), old, grid, stated, stream, old.size)
        except MalformedObject:
            outcomes.append("refused")
            continue
        positions, values = found
        assert (np.diff(positions.astype(np.int64)) > 0).all() and (positions < old.size).all()
        assert (values != old[positions]).all()
        outcomes.append((positions.tolist(), values.tolist()))
    assert outcomes[0] == outcomes[-1]


def test_a_tile_is_decoded_from_its_own_old_values_alone(ctx: ModuleType) -> None:
    old, changes = walk(1, 50, 96)
    grid = CtxGrid(50, 96, strips(32, 32, 32))
    model = model_of(ctx, [110, 255], 1)
    coded = encode(ctx, model, old, grid, changes)
    elsewhere = np.full((50, 96), 0xFFFF, np.uint16)
    elsewhere[:, 32:64] = old.reshape(50, 96)[:, 32:64]
    wanted = np.array([0, 1, 0], np.uint8)
    positions, values = ctx.ctx_decode(model, elsewhere.reshape(-1), grid, *coded, changes.old.size, wanted)
    own = (changes.positions % 96 >= 32) & (changes.positions % 96 < 64)
    assert own.any()
    np.testing.assert_array_equal(positions, changes.positions[own])
    np.testing.assert_array_equal(values, changes.new[own])


def test_a_tile_of_many_changes_has_four_states_and_reads_the_same() -> None:
    ctx = implementations()[-1]
    rng = np.random.default_rng(5)
    old = rng.integers(0, 1 << 16, 20_000).astype(np.uint16)
    new = np.where(rng.random(old.size) < 0.5, old + np.uint16(1), old).astype(np.uint16)
    changes = native.diff(old.copy(), new, advance=False)
    grid, model = CtxGrid(1, old.size, strips(old.size)), model_of(ctx, [63, 127, 255], 2)
    stated, data = encode(ctx, model, old, grid, changes)
    assert stated.tolist() == [data.size << 1 | 1]
    for reader in implementations():
        positions, _ = reader.ctx_decode(model_of(reader, [63, 127, 255], 2), old, grid, stated, data, changes.old.size)
        np.testing.assert_array_equal(positions, changes.positions)


def test_a_block_of_many_tiles_has_none_larger_than_allowed() -> None:
    ctx = implementations()[-1]
    old, changes = walk(3, 4, 200_000)
    grid = CtxGrid(4, 200_000, strips(150_000, 50_000))
    assert grid.boxes.tolist() == [
        *([row, 1, 0, 150_000] for row in range(4)),
        [0, 4, 150_000, 50_000],
    ]
    model = model_of(ctx, [110, 115, 255], 4)
    positions, values = ctx.ctx_decode(model, old, grid, *encode(ctx, model, old, grid, changes), changes.old.size)
    np.testing.assert_array_equal(positions, changes.positions)
    np.testing.assert_array_equal(values, changes.new)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, (20_000,)), (1, (9_000, 11_000)), (3, (9_000, 11_000)), (900, (13, 27)), (700, (40,))],
    ids=["one row", "strips of one row", "long strips", "narrow strips", "rows as one"],
)
def test_a_tile_that_is_looked_at_piece_by_piece_is_written_as_by_the_portable_one(
    rows: int, columns: tuple[int, ...]
) -> None:
    old, changes = walk(4, rows, sum(columns))
    grid = CtxGrid(rows, sum(columns), strips(*columns))
    written = [
        encode(ctx, model_of(ctx, [108, 112, 115, 255], 6), old, grid, changes)
        for ctx in dict.fromkeys([portable_ctx, implementations()[-1]])
    ]
    for one, other in zip(written[0], written[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_does_not_fit_the_room_is_not_written(ctx: ModuleType) -> None:
    old, changes = walk(2, 10, 64)
    grid, model = CtxGrid(10, 64, strips(64)), model_of(ctx, [255], 1)
    _, data = encode(ctx, model, old, grid, changes)
    assert ctx.ctx_encode(model, old, grid, changes, data.size) is not None
    assert ctx.ctx_encode(model, old, grid, changes, data.size - 1) is None


@pytest.mark.parametrize(
    ("gaps", "steps"),
    [
        ({0: 2048, 1: 2048}, {0: 2048, STEP_ESCAPE: 2048}),  # no end
        ({0: 2048, GAP_END: 2048}, {0: 2048, STEP_ESCAPE: 2048}),  # neither a gap of 1 nor an escape
        ({0: 1024, 1: 1024, GAP_END: 2048}, {1: 4096}),  # neither a step of 1 nor an escape
    ],
)
def test_what_a_model_cannot_say_is_not_written(ctx: ModuleType, gaps: dict[int, int], steps: dict[int, int]) -> None:
    new = np.array([0x3C00, 0x3C02, 0xBC03, 0x3F80], np.uint16)
    changes = native.diff(WORKED.copy(), new, advance=False)
    tables = np.array([spread(GAP_SYMBOLS, gaps)]), np.array([spread(STEP_SYMBOLS, steps)])
    model = ctx.ctx_model(np.array([255], np.uint8), *tables)
    assert ctx.ctx_encode(model, WORKED, CtxGrid(1, 4, strips(4)), changes, 100) is None


def test_more_changes_than_stated_are_refused(ctx: ModuleType) -> None:
    old, changes = walk(2, 10, 64)
    grid, model = CtxGrid(10, 64, strips(32, 32)), model_of(ctx, [255], 1)
    coded = encode(ctx, model, old, grid, changes)
    with pytest.raises(MalformedObject, match="more than"):
        ctx.ctx_decode(model, old, grid, *coded, changes.old.size - 1)


@pytest.mark.parametrize("cut", [0, 1, -1], ids=["whole", "short", "long"])
def test_every_byte_of_a_tile_counts(ctx: ModuleType, cut: int) -> None:
    old, changes = walk(6, 10, 64)
    grid, model = CtxGrid(10, 64, strips(64)), model_of(ctx, [255], 3)
    _, data = encode(ctx, model, old, grid, changes)
    data = np.concatenate([data, np.zeros(1, np.uint8)])[: data.size - cut]
    decode = (model, old, grid, np.array([data.size << 1]), data, changes.old.size)
    if cut == 0:
        assert ctx.ctx_decode(*decode)[0].size == changes.old.size
        return
    with pytest.raises(MalformedObject):
        ctx.ctx_decode(*decode)


def test_sizes_that_are_not_the_datas_are_refused(ctx: ModuleType) -> None:
    old, _ = walk(6, 10, 64)
    grid, model = CtxGrid(10, 64, strips(32, 32)), model_of(ctx, [255], 3)
    for sizes in ([9, 0], [-1, 9], [4, 5], [4, 3], [1 << 62, -(1 << 62) + 8]):
        with pytest.raises(MalformedObject, match=r"of 8|not all"):
            ctx.ctx_decode(model, old, grid, np.array(sizes) << 1, np.zeros(8, np.uint8), 9)


@pytest.mark.parametrize(
    ("index", "stated"),
    [
        ("0a 03", [10, 3]),
        ("8a 00 03", [10, 3]),  # longer than it needs to be
        ("0a", None),
        ("0a 83", None),
        ("0a 03 00", None),
        ("0a 05", None),  # 7 bytes
        ("0a ff ff ff ff 01", None),
        ("", None),
    ],
)
def test_an_index_states_each_tile_and_nothing_else(ctx: ModuleType, index: str, stated: list[int] | None) -> None:
    stream = np.frombuffer(bytes.fromhex(index), np.uint8)
    if stated is None:
        with pytest.raises(MalformedObject, match="index"):
            ctx.ctx_index(stream, 2, 6)
    else:
        assert ctx.ctx_index(stream, 2, 6).tolist() == stated


@pytest.mark.parametrize(
    ("last", "gap", "step"),
    [
        ([254], TOTAL, TOTAL),
        ([255], TOTAL - 1, TOTAL),
        ([255], TOTAL, TOTAL + 1),
        ([9, 9, 255], TOTAL, TOTAL),
        ([], 0, 0),
    ],
)
def test_a_model_that_is_none_is_refused(ctx: ModuleType, last: list[int], gap: int, step: int) -> None:
    gaps, steps = np.zeros((len(last), GAP_SYMBOLS), np.uint16), np.zeros((len(last), STEP_SYMBOLS), np.uint16)
    gaps[:, 0], steps[:, 0] = gap, step
    with pytest.raises(MalformedObject, match="model"):
        ctx.ctx_model(np.array(last, np.uint8), gaps, steps)


def test_grids_and_changes_that_do_not_fit_are_refused(ctx: ModuleType) -> None:
    old, changes = walk(6, 10, 64)
    model = model_of(ctx, [255], 3)
    for grid in (
        CtxGrid(10, 64, strips(32, 31)),
        CtxGrid(10, 64, np.array([[0, 33], [32, 32]])),
        CtxGrid(10, 64, np.array([[0, 64], [64, 0]])),
        CtxGrid(9, 64, strips(64)),
    ):
        with pytest.raises(ValueError):
            ctx.ctx_encode(model, old, grid, changes, 1 << 20)
    outside = Changes(np.array([640], np.uint32), changes.old[:1], changes.new[:1])
    with pytest.raises(ValueError, match="ascend"):
        ctx.ctx_encode(model, old, CtxGrid(10, 64, strips(64)), outside, 1 << 20)
    with pytest.raises(ValueError, match="1, 2 or 4"):
        ctx.ctx_encode(model, old.astype(np.uint64), CtxGrid(10, 64, strips(64)), changes, 1 << 20)


WORKED = np.array([0x3C00, 0x3C01, 0xBC02, 0x3F80], np.uint16)


def worked_model(ctx: ModuleType) -> CtxModel:
    gaps = np.array([spread(GAP_SYMBOLS, {0: 1024, 1: 1024, GAP_END: 1024, GAP_ESCAPE: 1024})])
    steps = np.array([spread(STEP_SYMBOLS, {0: 2048, 1: 1024, STEP_ESCAPE: 1024})])
    made: CtxModel = ctx.ctx_model(np.array([255], np.uint8), gaps, steps)
    return made


def read_worked(ctx: ModuleType, tile: str, old: np.ndarray) -> list[int]:
    data = np.frombuffer(bytes.fromhex(tile), np.uint8)
    grid, stated = CtxGrid(1, old.size, strips(old.size)), np.array([data.size << 1])
    positions: np.ndarray = ctx.ctx_decode(worked_model(ctx), old, grid, stated, data, 4)[0]
    return positions.tolist()


def test_the_bytes_are_those_of_the_protocol(ctx: ModuleType) -> None:
    """The worked tile of docs/protocol.md."""
    new = np.array([0x3C00, 0x3C02, 0xBC03, 0x3F80], np.uint16)
    changes = native.diff(WORKED.copy(), new, advance=False)
    index, data = ctx.ctx_encode(worked_model(ctx), WORKED, CtxGrid(1, 4, strips(4)), changes, 100)
    # Gaps 1, 0 and the end, 2 bits each; two steps away from zero, 1 bit each.
    assert (index.hex(" "), data.hex(" ")) == ("08", "00 84 00 01")
    assert read_worked(ctx, "00 84 00 01", WORKED) == [1, 2]


@pytest.mark.parametrize("tile", ["00 84 00 01 00", "00 84 00 01 00 00", "00 84 00", "00 84 00 00", "00 84 00 02"])
def test_a_tile_with_a_byte_too_many_or_too_few_or_another_end_is_refused(ctx: ModuleType, tile: str) -> None:
    with pytest.raises(MalformedObject):
        read_worked(ctx, tile, WORKED)


def test_a_rank_beyond_the_last_member_is_refused(ctx: ModuleType) -> None:
    assert read_worked(ctx, "00 84 00 01", WORKED[:3]) == [1, 2]
    with pytest.raises(MalformedObject):
        read_worked(ctx, "00 84 00 01", WORKED[:2])


def test_bits_that_fill_the_last_byte_are_zero(ctx: ModuleType) -> None:
    old = np.zeros(64, np.uint16)
    changes = Changes(np.array([40], np.uint32), old[:1], np.array([1], np.uint16))
    grid = CtxGrid(1, 64, strips(64))
    stated, data = encode(ctx, worked_model(ctx), old, grid, changes)  # the gap is escaped: 18 raw bits
    decode = (worked_model(ctx), old, grid, stated)
    assert ctx.ctx_decode(*decode, data, 1)[0].tolist() == [40]
    for bit in range(2, 8):
        damaged = data.copy()
        damaged[-3] ^= 1 << bit
        with pytest.raises(MalformedObject):
            ctx.ctx_decode(*decode, damaged, 1)
