"""How the bytes of an update, and the time to commit it, grow with what changes: normal updates of one size each.

Does not draw: `chart` does. The updates are made of a real model; only their size is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_delta_sync import native
from vllm_delta_sync.bench import apply, peers
from vllm_delta_sync.bench.apply import Step
from vllm_delta_sync.bench.clock import interleaved
from vllm_delta_sync.bench.codings import CODINGS, payload_bytes, updates
from vllm_delta_sync.bench.data import SEED, jittered
from vllm_delta_sync.bench.step import Model, in_memory
from vllm_delta_sync.errors import BaseMismatch
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.shard import Ends

SPREADS = (8e-9, 3e-8, 4e-7, 2e-6, 1e-5, 5e-5, 1.5e-4, 6e-4)
"""Standard deviations of the updates: of SmolLM2-135M they change 0.07 % to 62 %."""

_ENDS = Ends("0" * 32, 0, 1)


@dataclass(frozen=True, slots=True)
class Point:
    """One update."""

    density: float  # of all elements
    changed: int  # elements
    bytes_per_change: dict[str, float]  # by codec, table and container counted
    commit_ms: dict[str, float]  # "ours", "ours, two threads", "index_copy_": medians, from a cold cache


def measure(checkpoint: Path, rounds: int = 5) -> list[Point]:
    """Updates of each size to a checkpoint of bf16 tensors; raises BaseMismatch for one of others."""
    before = in_memory(open_checkpoint(checkpoint))
    other = next((spec for spec, _ in before.values() if spec.dtype != "BF16"), None)
    if other is not None:
        raise BaseMismatch(f"{other} in {checkpoint}: updates are made of bf16 tensors only")
    return [_point(before, after, rounds) for after in _moved(before)]


def _moved(before: Model) -> Iterator[Model]:
    random = torch.Generator().manual_seed(SEED)
    for spread in SPREADS:
        moved = {}
        for name, tensor in peers.as_tensors(before).items():
            master = jittered(tensor, random)
            master += spread * torch.randn(master.shape, generator=random)
            moved[name] = before[name][0], master.bfloat16().view(torch.int16).view(-1).numpy().view("u2")
        yield moved


def _point(before: Model, after: Model, rounds: int) -> Point:
    specs = tuple(spec for spec, _ in before.values())
    changes = tuple(native.diff(bits, after[name][1], advance=False) for name, (_, bits) in before.items())
    step = Step(specs, tuple(bits for _, bits in before.values()), changes)
    sizes = {name: payload_bytes(_ENDS, updates(before, after, coding)) for name, coding in CODINGS.items()}
    seconds = interleaved(
        {
            "ours": apply.ours(step, 1),
            "ours, two threads": apply.ours(step, 2),
            "index_copy_": apply.index_copy(step),
        },
        rounds,
    )
    return Point(
        density=step.changed / sum(spec.numel for spec in specs),
        changed=step.changed,
        bytes_per_change={name: size / step.changed for name, size in sizes.items()},
        commit_ms={name: 1e3 * value for name, value in seconds.items()},
    )
