"""How long it takes to write one update into live weights: ours, torch's `index_copy_`, and vLLM's own sparse patching.

Does not measure fetching, decoding or mapping: those overlap serving. Ours compares every live element before it writes
it and can undo the whole; `index_copy_` and vLLM's do neither. All write into memory on huge pages, where a server that
follows a log keeps its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_delta_sync import native
from vllm_delta_sync.bench import vllm_model
from vllm_delta_sync.bench.clock import interleaved
from vllm_delta_sync.bench.step import read
from vllm_delta_sync.errors import BaseMismatch
from vllm_delta_sync.native import Changes, huge_pages
from vllm_delta_sync.native.types import U32, Bits
from vllm_delta_sync.wire.tensors import TensorSpec


@dataclass(frozen=True)
class ApplyTimes:
    """Median times to write one update, from a cold cache."""

    changed: int  # elements
    threads: int  # CPU threads of all but ours_2threads_ms
    ours_ms: float
    ours_2threads_ms: float
    index_copy_ms: float
    vllm_sparse_ms: float


@dataclass(frozen=True)
class Step:
    """The tensors of a checkpoint, and what the next one changes in them."""

    specs: tuple[TensorSpec, ...]
    live: tuple[Bits, ...]  # u16 [numel] each, plain memory
    changes: tuple[Changes, ...]

    @property
    def changed(self) -> int:
        return sum(change.positions.size for change in self.changes)


def read_step(old: Path, new: Path) -> Step:
    """Diff two checkpoints. Raises BaseMismatch as `step.read` does, and where a tensor is not of bf16."""
    before, after = read(old, new)
    specs = tuple(spec for spec, _ in before.values())
    other = next((spec for spec in specs if spec.dtype != "BF16"), None)
    if other is not None:
        raise BaseMismatch(f"{other} in {old}: vLLM's patching is compared on bf16 tensors only")
    live = tuple(bits for _, bits in before.values())
    changes = tuple(native.diff(bits, after[name][1], advance=False) for name, (_, bits) in before.items())
    return Step(specs, live, changes)


def measure(old: Path, new: Path, threads: int = 1, rounds: int = 9) -> ApplyTimes:
    """Write the step from old to new and back, in turns with the others; every turn writes all changed elements."""
    step = read_step(old, new)
    torch.set_num_threads(threads)
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours(step, threads),
        "ours on two threads": ours(step, 2),
        "index_copy_": index_copy(step),
        "vllm": _vllm(step, old),
    }
    try:
        for run in contenders.values():
            run()  # page in, and let lazy set-up happen
        seconds = interleaved(contenders, rounds)
    finally:
        vllm_model.close()
    return ApplyTimes(
        changed=step.changed,
        threads=threads,
        ours_ms=seconds["ours"] * 1e3,
        ours_2threads_ms=seconds["ours on two threads"] * 1e3,
        index_copy_ms=seconds["index_copy_"] * 1e3,
        vllm_sparse_ms=seconds["vllm"] * 1e3,
    )


def _joined(step: Step) -> tuple[U32, Bits, Bits]:
    positions, old, new = (np.concatenate(column) for column in zip(*step.changes, strict=True))
    return positions, old, new


def ours(step: Step, threads: int) -> Callable[[], object]:
    """A commit by our kernel: there and back in turns, in memory of its own."""
    live = _live(step)
    ends = np.cumsum([change.positions.size for change in step.changes])
    segments = np.zeros((len(live), 4), np.int64)
    segments[:, 0] = [bits.ctypes.data for bits in live]
    segments[1:, 1], segments[:, 2] = ends[:-1], ends
    offsets, *sides = _joined(step)

    def run() -> None:
        index = native.scatter(segments, offsets, sides[0], sides[1], threads=threads)
        assert index == -1, f"element {index} of {live[0].size} is not as expected"
        sides.reverse()

    return run


def _live(step: Step) -> list[Bits]:
    """A copy to write into."""
    live = [bits.copy() for bits in step.live]
    huge_pages.prefer((bits.ctypes.data, bits.nbytes) for bits in live)
    return live


def _torch_rows(step: Step) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Per changed tensor: sorted int64 indices, and both sides' values as bf16."""
    rows = []
    for change in step.changes:
        sides = [torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (change.new, change.old)]
        rows.append((torch.from_numpy(change.positions.astype(np.int64)), sides))
    return rows


def index_copy(step: Step) -> Callable[[], object]:
    """The same by torch's `index_copy_`, tensor by tensor, which neither compares nor can undo."""
    live = [torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in _live(step)]
    rows = _torch_rows(step)

    def run() -> None:
        for target, (index, sides) in zip(live, rows, strict=True):
            target.index_copy_(0, index, sides[0])
            sides.reverse()

    return run


def _vllm(step: Step, checkpoint: Path) -> Callable[[], object]:
    def weights() -> list[tuple[str, torch.Tensor]]:
        return [
            (spec.name, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(spec.shape))
            for spec, bits in zip(step.specs, step.live, strict=True)
        ]

    model = vllm_model.build(checkpoint, weights())
    huge_pages.prefer((parameter.data_ptr(), parameter.nbytes) for parameter in model.parameters())
    from vllm.model_executor.model_loader import checkpoint_weight_patch as vllm_patch

    def patches(side: int) -> list[Any]:
        return [
            vllm_patch.CheckpointWeightPatch(spec.name, spec.shape, torch.bfloat16, sides[side], index)
            for spec, (index, sides) in zip(step.specs, _torch_rows(step), strict=True)
            if index.numel()
        ]

    sides = [patches(0), patches(1)]

    def run() -> None:
        vllm_patch.load_checkpoint_weight_patches(model, sides[0])
        sides.reverse()

    return run
