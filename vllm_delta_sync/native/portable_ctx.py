"""The `ctx` codec's loops in Python, one symbol at a time: where there is no C library, and to hold that one against.

Gives the same bytes as `ctx_cpu.py`, hundreds of times slower.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.ctx_types import (
    CONTEXTS,
    GAP_END,
    GAP_ESCAPE,
    LANE_CHANGES,
    MANY_LANES,
    STEP_ESCAPE,
    CtxGrid,
    CtxModel,
    Tally,
    check_block,
    check_changes,
    check_cover,
    check_model,
    check_sizes,
    check_stated,
    malformed,
    unsorted,
)
from vllm_delta_sync.native.portable_ctx_stream import (
    Cut,
    Reader,
    Unsayable,
    Writer,
    bits_after,
    magnitude,
    number_of,
    varint,
)
from vllm_delta_sync.native.types import I64, U8, U16, U32, Bits, Changes, pair_width, row

__all__ = ["ctx_decode", "ctx_encode", "ctx_index", "ctx_model", "ctx_survey", "ctx_tally"]

GAP_BITS = 18  # of an escaped gap


def _contexts(old: Bits) -> U8:
    if old.itemsize == 1:
        return np.asarray(old & 0x7F, np.uint8)
    return np.asarray((old >> (7 if old.itemsize == 2 else 23)) & 0xFF, np.uint8)


def _rank(u: Bits) -> Bits:
    sign = u.dtype.type(1 << (8 * u.itemsize - 1))
    return np.where(u & sign, sign - u.dtype.type(1) - u, u).astype(u.dtype)


def _oriented(steps: Bits, old: Bits) -> Bits:
    sign = old.dtype.type(1 << (8 * old.itemsize - 1))
    return np.where(old & sign, np.zeros_like(steps) - steps, steps).astype(steps.dtype)


def _folded(old: Bits, new: Bits) -> Bits:
    """The oriented step s from old to new as 2 (|s| − 1) + (s < 0)."""
    one, sign = old.dtype.type(1), old.dtype.type(1 << (8 * old.itemsize - 1))
    step = _oriented(_rank(new) - _rank(old), old)
    below = (step & sign) != 0
    size = np.where(below, np.zeros_like(step) - step, step).astype(step.dtype)
    return np.asarray((size - one) * old.dtype.type(2) + below.astype(step.dtype))


def _unfolded(z: Bits) -> Bits:
    one = z.dtype.type(1)
    size = (z >> one) + one
    return np.where(z & one, np.zeros_like(size) - size, size).astype(z.dtype)


def _class_of(last: U8) -> U8:
    return np.searchsorted(last, np.arange(CONTEXTS)).astype(np.uint8)


def ctx_model(last: U8, gaps: U16, steps: U16) -> CtxModel:
    """Classes that end at contexts `last` u8 [C], with frequencies u16 [C, 74] and [C, 249]; MalformedObject if not."""
    check_model(last, gaps, steps)
    return CtxModel(last, gaps, steps, np.empty(0, np.uint8))


def _tiles(grid: CtxGrid) -> Iterator[tuple[int, I64]]:
    """Each tile's number, and where its elements are in the block, row by row."""
    for index, (first, rows, column, columns) in enumerate(grid.boxes.tolist()):
        places = (first + np.arange(rows))[:, None] * grid.row_length + column + np.arange(columns)
        yield index, places.reshape(-1)


def _events(last: U8, old: Bits, places: I64, changes: Changes) -> Iterator[tuple[int, list[int], list[int]]]:
    """Each class, and the gaps and folded steps of a tile's changes in it."""
    inside = np.isin(changes.positions, places)
    positions, z = changes.positions[inside].astype(np.int64), _folded(changes.old[inside], changes.new[inside])
    where = np.searchsorted(places, positions)  # a tile's places ascend
    of = _class_of(last)[_contexts(old[places])]
    for c in range(last.size):
        rank = np.cumsum(of == c) - 1
        own = of[where] == c
        gaps = np.diff(rank[where[own]], prepend=-1) - 1
        yield c, gaps.tolist(), z[own].tolist()


def _check_order(grid: CtxGrid, changes: Changes) -> None:
    positions = changes.positions
    if positions.size and (int(positions[-1]) >= grid.elements or (positions[1:] <= positions[:-1]).any()):
        raise unsorted(grid)


def ctx_encode(model: CtxModel, old: Bits, grid: CtxGrid, changes: Changes, room: int) -> tuple[bytes, bytes] | None:
    """What the index states of the tiles (docs/protocol.md, *ctx*), and their bytes; None if they take over `room`.

    So it is where the model cannot say a tile. old uW [rows · row_length] before the changes; room in bytes.
    """
    width = check_block(grid, old)
    check_cover(grid)
    check_changes(old, changes)
    _check_order(grid, changes)
    pieces, many = [b""] * grid.tiles, [False] * grid.tiles
    for tile, places in _tiles(grid):
        found = [(c, gaps, steps) for c, gaps, steps in _events(model.last, old, places, changes)]
        changed = sum(len(gaps) for _, gaps, _ in found)
        many[tile] = changed >= LANE_CHANGES
        if not changed:
            continue
        writer = Writer(MANY_LANES if many[tile] else 1)
        for c, gaps, steps in found:
            for i, gap in enumerate(gaps):
                writer.number(model.gaps[c], *magnitude(gap), (GAP_ESCAPE, GAP_BITS, gap), i)
            writer.add(model.gaps[c], GAP_END, len(gaps))
            for i, z in enumerate(steps):
                symbol, bits, raw = magnitude(z >> 1)
                writer.number(model.steps[c], symbol << 1 | z & 1, bits, raw, (STEP_ESCAPE, 8 * width, z), i)
        try:
            pieces[tile] = writer.bytes()
        except Unsayable:
            return None
    data = b"".join(pieces)
    if len(data) > room:
        return None
    return b"".join(varint(len(piece) << 1 | four) for piece, four in zip(pieces, many, strict=True)), data


def ctx_index(index: U8, tiles: int, size: int) -> I64:
    """What an index states of so many tiles, `size` bytes together, as `ctx_decode` wants it, i64 [T].

    MalformedObject if it is not exactly that.
    """
    row("index", index, np.uint8)
    stated, value, shift = [], 0, 0
    for byte in index.tolist():
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            stated.append(value)
            value = shift = 0
        elif shift == 28:
            raise MalformedObject(f"a ctx index stream of {tiles} tiles has a number of 2**28 or more")
    if shift or len(stated) != tiles or sum(value >> 1 for value in stated) != size:
        raise MalformedObject(
            f"a ctx index stream is not of {tiles} tiles, or does not add up to the bytes of the tiles"
        )
    return np.array(stated, np.int64)


def _decode_tile(model: CtxModel, old: Bits, places: I64, data: bytes, lanes: int) -> tuple[list[I64], list[Bits]]:
    reader, width = Reader(data, lanes), old.itemsize
    of = _class_of(model.last)[_contexts(old[places])]
    positions, values = [], []
    for c in range(model.last.size):
        members, rank = np.flatnonzero(of == c), -1
        ranks: list[int] = []
        while (symbol := reader.symbol(model.gaps[c], len(ranks))) != GAP_END:
            escape = symbol == GAP_ESCAPE
            rank += 1 + (reader.raw(GAP_BITS) if escape else number_of(symbol, reader.raw(bits_after(symbol))))
            if rank >= members.size:
                raise Cut
            ranks.append(rank)
        z = []
        for i in range(len(ranks)):
            symbol = reader.symbol(model.steps[c], i)
            if symbol == STEP_ESCAPE:
                z.append(reader.raw(8 * width))
                continue
            size = number_of(symbol >> 1, reader.raw(bits_after(symbol >> 1)))
            if size >> (8 * width - 1):
                raise Cut
            z.append(size << 1 | symbol & 1)
        where = places[members[ranks]] if ranks else places[:0]
        positions.append(where)
        step = _oriented(_unfolded(np.array(z, old.dtype)), old[where])
        values.append(_rank(_rank(old[where]) + step))
    if not reader.finished():
        raise Cut
    return positions, values


def ctx_decode(
    model: CtxModel, old: Bits, grid: CtxGrid, stated: I64, data: U8, changed: int, wanted: U8 | None = None
) -> tuple[U32, Bits]:
    """The changes of the wanted tiles, at most `changed`: positions u32 [n], ascending, and new values uW [n].

    old uW [rows · row_length] is right in those tiles and may be anything elsewhere. Of each tile, i64 and u8 [T]:
    bytes << 1 | whether it has four states is `stated`, whether it is `wanted`; all are if that is None.
    MalformedObject if the bytes of a wanted tile are not exactly what docs/protocol.md says.
    """
    check_block(grid, old)
    check_cover(grid)
    check_stated(grid, stated, data, wanted)
    sizes = check_sizes(stated, data)
    ends = np.cumsum(sizes)
    positions, values = [np.empty(0, np.int64)], [np.empty(0, old.dtype)]
    for tile, places in _tiles(grid):
        if not sizes[tile] or (wanted is not None and not wanted[tile]):
            continue
        piece = data[ends[tile] - sizes[tile] : ends[tile]].tobytes()
        try:
            found = _decode_tile(model, old, places, piece, MANY_LANES if stated[tile] & 1 else 1)
        except Cut:
            found = ([], [])
        total = sum(part.size for part in positions) + sum(part.size for part in found[0])
        if not sum(part.size for part in found[0]) or total > changed:
            raise malformed(grid, changed)
        positions += found[0]
        values += found[1]
    where = np.concatenate(positions)
    order = np.argsort(where)
    return where[order].astype(np.uint32), np.concatenate(values)[order]


def ctx_tally(model: CtxModel, old: Bits, grid: CtxGrid, changes: Changes, to: Tally) -> None:
    """Add the symbols of the changes in the grid's strips, by class of the model; its tiles' ends among them."""
    check_block(grid, old)
    check_changes(old, changes)
    _check_order(grid, changes)
    for _, places in _tiles(grid):
        if not np.isin(changes.positions, places).any():
            continue
        for c, skipped, folded in _events(model.last, old, places, changes):
            for gap in skipped:
                to.gaps[c, magnitude(gap)[0]] += 1
            to.gaps[c, GAP_END] += 1
            for z in folded:
                to.steps[c, magnitude(z >> 1)[0] << 1 | z & 1] += 1


def ctx_survey(old: Bits, before: Bits, after: Bits, to: Tally) -> None:
    """Add elements of old uW [N] by context, and step symbols of before → after uW [n] by the context of `before`."""
    pair_width("before", before, "after", after)
    to.gaps[:] += np.bincount(_contexts(old), minlength=CONTEXTS)
    for c, z in zip(_contexts(before).tolist(), _folded(before, after).tolist(), strict=True):
        to.steps[c, magnitude(z >> 1)[0] << 1 | z & 1] += 1
