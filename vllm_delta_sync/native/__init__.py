"""The hot loops on numpy buffers and raw addresses.

Does not import torch, vLLM or anything above it.
"""

from __future__ import annotations

from vllm_delta_sync.native.portable import (
    apply_steps,
    decode_gaps,
    decode_steps,
    diff,
    encode_gaps,
    encode_steps,
    gather,
    hash_changes,
    hash_run,
    hash_strided,
    map_positions,
    read_sum,
    scatter,
)
from vllm_delta_sync.native.types import Changes, Seed


def backend() -> str:
    """Which implementation is active, for logs and status."""
    return "portable (numpy)"


def backend_reason() -> str:
    """Why that one is active."""
    return "the C library is not built"


__all__ = [
    "Changes",
    "Seed",
    "apply_steps",
    "backend",
    "backend_reason",
    "decode_gaps",
    "decode_steps",
    "diff",
    "encode_gaps",
    "encode_steps",
    "gather",
    "hash_changes",
    "hash_run",
    "hash_strided",
    "map_positions",
    "read_sum",
    "scatter",
]
