"""The updates that everything here is measured on: two real steps of SmolLM2-135M, and two synthetic ones.

Does not measure, and does not make anything twice: checkpoints stay in a cache folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import load_file

from vllm_delta_sync.demo import checkpoint
from vllm_delta_sync.demo.steps import real_step
from vllm_delta_sync.demo.train import Trainer
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.wire.checkpoint import open_checkpoint

SEED = 20260101
INSIDE = 0.998  # of a rounding cell: what rounding to fp32 cannot carry over its edge
SPREAD = {"sparse": 1.5e-8, "dense": 8e-5}  # standard deviation of an update, found by trial to change the stated share


class Data(StrEnum):
    """Which update. `cold` and `warm` are an AdamW step at a learning rate of 3e-6 on 4 × 128 tokens of English."""

    COLD = "cold"  # the fp32 master began at the bf16 checkpoint: weights in the middle of their rounding cells
    WARM = "warm"  # it began anywhere inside the cells, as after a long run
    SPARSE = "sparse"  # normal updates of one size, about 0.1 % of the elements change
    DENSE = "dense"  # the same, about 20 %


@dataclass(frozen=True)
class Share:
    """How much of a model an update changes."""

    changed: int  # elements
    elements: int
    density: float  # the one by the other


def changed(old: Path, new: Path) -> Share:
    """Count what differs between two checkpoints of the same tensors."""
    before, after = open_checkpoint(old), open_checkpoint(new)
    counts = [int((bits != after[name][1]).sum()) for name, (_, bits) in before.items()]
    elements = sum(spec.numel for spec, _ in before.values())
    return Share(sum(counts), elements, sum(counts) / elements)


def made(data: str, cache: Path) -> tuple[Path, Path]:
    """The directories of the older and the newer checkpoint of an update, bf16, made in `cache` if need be.

    Seeded throughout. The real steps take about a minute each to make.

    Raises ConfigError for an unknown name, and as `demo.checkpoint.smollm2` does.
    """
    if data not in tuple(Data):
        raise ConfigError(f"there is no data {data!r}; it is one of {', '.join(Data)}")
    if data == Data.COLD:
        return real_step(cache)
    if data == Data.WARM:
        return real_step(cache, "smollm2-135m-warm-step", _jitter_master)
    old = real_step(cache)[0]

    def build(directory: Path) -> None:
        random = torch.Generator().manual_seed(SEED)
        tensors = load_file(old / checkpoint.WEIGHTS)
        moved = {}
        for name in sorted(tensors):
            master = jittered(tensors[name], random)
            moved[name] = master + SPREAD[data] * torch.randn(master.shape, generator=random)
        checkpoint.write(directory, moved, like=old)

    return old, checkpoint.build_once(cache / f"smollm2-135m-{data}", build)


def jittered(bits: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """fp32 numbers drawn uniformly from the rounding cells of bf16 numbers, any shape: each rounds to its own again."""
    places = bits.view(torch.int16)
    outward = ((places + 1).view(torch.bfloat16).float() - bits.float()) / 2  # away from zero
    inward = ((places - 1).view(torch.bfloat16).float() - bits.float()) / 2
    inward = torch.where(places & 0x7FFF == 0, -outward, inward)  # below zero lies the other sign
    draw = (torch.rand(bits.shape, generator=random) * 2 - 1) * INSIDE
    return bits.float() + torch.where(draw < 0, -draw * inward, draw * outward)


def _jitter_master(trainer: Trainer) -> None:
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for _, parameter in sorted(trainer.state().items()):
            parameter.copy_(jittered(parameter.detach().to(torch.bfloat16), random))
