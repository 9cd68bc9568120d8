"""How fast a full pass of the state hash is, beside how fast the same memory can be read at all.

Uses one thread, as an audit does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.bench.clock import interleaved
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.checkpoint import open_checkpoint


@dataclass(frozen=True)
class HashSpeed:
    """Speeds over all tensors of a checkpoint, one thread, cold cache."""

    hash_gb_s: float  # 10⁹ bytes a second
    read_gb_s: float  # 10⁹ bytes a second


def measure(checkpoint: Path, rounds: int = 9) -> HashSpeed:
    """Hash every tensor of the checkpoint in that directory, and read the same memory, in turns."""
    tensors = []
    total = 0
    for spec, bits in open_checkpoint(checkpoint).values():
        copy = np.array(bits)  # out of the page cache's mapping: plain memory, as live weights are
        tensors.append((copy, copy.view(np.uint8), state_hash.seed(spec)))
        total += copy.nbytes

    def hash_all() -> None:
        for bits, _, seed in tensors:
            native.hash_run(bits, 0, seed)

    def read_all() -> None:
        for _, data, _ in tensors:
            native.read_sum(data)

    seconds = interleaved({"hash": hash_all, "read": read_all}, rounds)
    return HashSpeed(hash_gb_s=total / seconds["hash"] / 1e9, read_gb_s=total / seconds["read"] / 1e9)
