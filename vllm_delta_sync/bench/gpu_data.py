"""Weights, updates and ctx tiles that the GPU kernels are compared and timed on.

Needs torch and numpy only, as `bench.gpu` does; takes no part in comparing or timing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vllm_delta_sync import native
from vllm_delta_sync.kernels import CodedBlock
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import Changes, CtxGrid, Tally
from vllm_delta_sync.native.ctx_types import (
    GAP_END,
    GAP_ESCAPE,
    GAP_SYMBOLS,
    STEP_ESCAPE,
    STEP_SYMBOLS,
    TILE_ELEMENTS,
    TOTAL,
)
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import ctx_model


def weights(elements: int, density: float, seed: int = 0) -> tuple[Bits, Changes]:
    """Bits uint16 of bf16 weights, and an update of one size that changes about the share `density` of them."""
    rng = np.random.default_rng(seed)
    before = rng.normal(0, 0.02, elements).astype(np.float32)
    after = before + rng.normal(0, density * 3e-5, elements).astype(np.float32)
    old, new = ((master.view(np.uint32) >> 16).astype(np.uint16) for master in (before, after))
    return old, native.diff(old, new, advance=False)


def anything(elements: int, width: int, density: float, seed: int) -> tuple[Bits, Changes]:
    """Bits of any kind, of which about the share `density` becomes others."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * width, np.uint8).view(f"u{width}")
    new = np.where(rng.random(elements) < density, old + rng.integers(1, 200, elements).astype(old.dtype), old)
    return old, native.diff(old, new.astype(old.dtype), advance=False)


def row(elements: int) -> CtxGrid:
    """A block of one row, cut into tiles of the largest size."""
    firsts = np.arange(0, elements, TILE_ELEMENTS, dtype=np.int64)
    return CtxGrid(1, elements, np.stack([firsts, np.minimum(TILE_ELEMENTS, elements - firsts)], axis=1))


def coded(old: Bits, changes: Changes, grid: CtxGrid, device: torch.device) -> CodedBlock:
    """The changes of a block, coded by a model of themselves, with its old values on a device."""
    contexts = Tally.of_contexts()
    native.ctx_survey(old, changes.old, changes.new, contexts)
    last = ctx_model.classes(contexts.gaps, contexts.steps, ctx_model.CLASS_BITS)
    even = np.zeros((last.size, STEP_SYMBOLS), np.uint16)
    even[:, 0] = TOTAL
    found = Tally.of_classes(last.size)
    native.ctx_tally(native.ctx_model(last, even[:, :GAP_SYMBOLS], even), old, grid, changes, found)
    gaps = ctx_model.frequencies(found.gaps, GAP_END, GAP_ESCAPE)
    model = native.ctx_model(last, gaps, ctx_model.frequencies(found.steps, STEP_ESCAPE))
    tiles = native.ctx_encode(model, old, grid, changes, 16 * changes.positions.size + 100 * grid.tiles)
    assert tiles is not None, "there is room for any tiles"
    index, data = (np.frombuffer(stream, np.uint8) for stream in tiles)
    stated = native.ctx_index(index, grid.tiles, data.size)
    return CodedBlock(model, to_device(old, device), grid, stated, data, changes.positions.size)


def damaged(block: CodedBlock, seed: int) -> CodedBlock:
    """The same with a byte changed, or with another number of states."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        return replace(block, stated=block.stated ^ 1)
    data = block.data.copy()
    data[rng.integers(0, data.size)] ^= rng.integers(1, 256, dtype=np.uint8)
    return replace(block, data=data)
