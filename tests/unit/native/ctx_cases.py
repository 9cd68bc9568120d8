"""Blocks, grids and models for tests of the ctx codec's loops.

Holds no assertions.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
from hypothesis import strategies as st

from tests.unit.native.special import SPECIAL
from vllm_delta_sync import native
from vllm_delta_sync.native import Changes, CtxGrid, CtxModel, portable_ctx
from vllm_delta_sync.native.ctx_types import GAP_END, GAP_ESCAPE, GAP_SYMBOLS, STEP_ESCAPE, STEP_SYMBOLS, TOTAL


def implementations() -> list[ModuleType]:
    try:
        from vllm_delta_sync.native import ctx_cpu
    except ImportError:
        return [portable_ctx]
    return [portable_ctx, ctx_cpu]


def spread(symbols: int, common: dict[int, int]) -> np.ndarray:
    """Frequencies: `common` as given, and what is left to the first of them."""
    found = np.zeros(symbols, np.uint16)
    for symbol, frequency in common.items():
        found[symbol] = frequency
    found[next(iter(common))] += TOTAL - int(found.sum())
    return found


def model_of(ctx: ModuleType, last: list[int], seed: int) -> CtxModel:
    """A model whose classes end at these contexts. It escapes what a seeded half of the symbols would have said."""
    rng = np.random.default_rng(seed)
    gaps, steps = [], []
    for _ in last:
        for found, symbols, always in (
            (gaps, GAP_SYMBOLS, (GAP_END, GAP_ESCAPE)),
            (steps, STEP_SYMBOLS, (STEP_ESCAPE,)),
        ):
            some = [s for s in range(symbols) if rng.random() < 0.5 and s not in always]
            found.append(spread(symbols, {symbol: 1 + int(rng.integers(0, 9)) for symbol in (*always, *some)}))
    made: CtxModel = ctx.ctx_model(np.array(last, np.uint8), np.array(gaps), np.array(steps))
    return made


def strips(*columns: int) -> np.ndarray:
    edges = np.cumsum([0, *columns])
    return np.stack([edges[:-1], np.array(columns)], axis=1).astype(np.int64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, CtxGrid, list[int], int]:
    """old, new uW, a grid over them, where classes end, and a seed."""
    dtype = np.dtype(draw(st.sampled_from([np.uint8, np.uint16, np.uint32])))
    rows, columns = draw(st.sampled_from([(1, (1,)), (1, (70, 130)), (5, (64,)), (9, (3, 5)), (40, (36, 36, 11))]))
    grid = CtxGrid(rows, sum(columns), strips(*columns))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, grid.elements * dtype.itemsize, np.uint8).view(dtype)
    if dtype.itemsize == 2:  # weights of a few exponents, and what is special
        old = (rng.normal(0, 1e-2, grid.elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        places = rng.integers(0, old.size, min(old.size, len(SPECIAL)))
        old[places] = rng.choice(SPECIAL, places.size)
    share = draw(st.sampled_from([0.0, 0.02, 0.4, 1.0]))
    noise = rng.integers(1, draw(st.sampled_from([3, 256])), old.size).astype(dtype)
    new = np.where(rng.random(old.size) < share, old + noise, old).astype(dtype)
    last = sorted(rng.choice(255, draw(st.integers(0, 15)), replace=False).tolist())
    return old, new, grid, [*last, 255], seed


def encode(ctx: ModuleType, model: CtxModel, old: np.ndarray, grid: CtxGrid, changes: Changes) -> list[np.ndarray]:
    """What is stated of each tile, and the tiles."""
    index, data = (np.frombuffer(stream, np.uint8) for stream in ctx.ctx_encode(model, old, grid, changes, 1 << 22))
    return [ctx.ctx_index(index, grid.tiles, data.size), data]


def walk(seed: int, rows: int, columns: int) -> tuple[np.ndarray, Changes]:
    rng = np.random.default_rng(seed)
    old = (rng.normal(0, 1e-2, rows * columns).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = np.where(rng.random(old.size) < 0.05, old + rng.integers(1, 3, old.size).astype(np.uint16), old)
    return old, native.diff(old.copy(), new.astype(np.uint16), advance=False)
