"""A matrix as a ctx block, ways for a rank to keep a part of it, and a model of which a log has such blocks.

Holds no assertions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from table_rows import row_of

from vllm_delta_sync import Publisher, native
from vllm_delta_sync.native import Changes
from vllm_delta_sync.serving.affine import Region, View, compose
from vllm_delta_sync.wire import ctx
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.codecs import Context, encode_block
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec

ROWS, COLUMNS = 384, 320

MATRIX = TensorSpec("w", "BF16", (ROWS, COLUMNS))


def ctx_block(dim: int, rate: float = 2e-5) -> tuple[Block, bytes, np.ndarray, Changes]:
    """A whole matrix as one block cut along a dimension, its old values and its changes: more for a larger `rate`."""
    rng = np.random.default_rng(dim)
    master = rng.normal(0, 0.02, MATRIX.numel).astype(np.float32)
    moved = master + rng.normal(0, rate, MATRIX.numel).astype(np.float32)
    old, new = ((bits.view(np.uint32) >> 16).astype(np.uint16) for bits in (master, moved))
    changes = native.diff(old, new, advance=False)
    model = ctx.make_model(lambda: iter([ctx.Sample(MATRIX, 0, old, changes, dim)]), 1.0)
    coded = encode_block(MATRIX, changes, 0, old.size, new, Context(model, old, dim))
    assert coded.codec == CTX
    return *row_of(MATRIX, coded), old, changes


def region(live: torch.Tensor, low: tuple[int, int], size: tuple[int, int], storage: int, dtype: str) -> Region:
    """Rows and columns of the matrix from `low` on, kept in a whole storage of that shape."""
    source = View(low[0] * COLUMNS + low[1], size, (COLUMNS, 1))
    return compose("w", source, View(0, size, live.stride()), storage, dtype)


KEPT = {
    "as it is": lambda part: part.clone(),
    "transposed": lambda part: part.T.contiguous().T,
    "as fp32": lambda part: part.float(),
}


def weights(vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    shapes = {"embed": (vocabulary, 64), "q": (128, 64), "k": (64, 64), "v": (64, 64), "bias": (64,)}
    shapes["o_proj.weight"] = (64, 128)
    return {name: random(*shape) for name, shape in shapes.items()} | {"norm": random(64), "scale": random()}


def train(state: dict[str, torch.Tensor], seed: int) -> None:
    """Updates of one size, as an optimiser makes them."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        moved = tensor.float() + 2e-5 * torch.randn(tensor.shape, generator=generator)
        state[name] = moved.to(torch.bfloat16)


def publish(where: Path, state: dict[str, torch.Tensor], steps: int) -> list[dict[str, torch.Tensor]]:
    states = [dict(state)]
    with Publisher.open(where, base=state, folds=None, anchors=None) as publisher:
        for step in range(steps):
            train(state, step)
            publisher.publish(state)
            states.append(dict(state))
    return states
