"""The hot loops on numpy buffers and raw addresses: the C library when it loads, else the same in numpy.

Does not import torch, vLLM or anything above it. Both implementations give the same bits.
"""

from __future__ import annotations

from vllm_delta_sync.native.ctx_types import CtxGrid, CtxModel, Tally
from vllm_delta_sync.native.types import Changes, Seed

try:
    from vllm_delta_sync.native.cpu import (
        INSTRUCTION_SET,
        PATH,
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
        merge,
        read_sum,
        scatter,
    )
    from vllm_delta_sync.native.ctx_cpu import ctx_decode, ctx_encode, ctx_index, ctx_model, ctx_survey, ctx_tally

    _BACKEND = f"native ({INSTRUCTION_SET})"
    _REASON = PATH
except ImportError as error:
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
        merge,
        read_sum,
        scatter,
    )
    from vllm_delta_sync.native.portable_ctx import ctx_decode, ctx_encode, ctx_index, ctx_model, ctx_survey, ctx_tally

    _BACKEND = "portable (numpy)"
    _REASON = str(error)


def backend() -> str:
    """Which implementation is active, for logs and status: "native (avx2)" or "portable (numpy)"."""
    return _BACKEND


def backend_reason() -> str:
    """The library's path, or why there is none."""
    return _REASON


__all__ = [
    "Changes",
    "CtxGrid",
    "CtxModel",
    "Seed",
    "Tally",
    "apply_steps",
    "backend",
    "backend_reason",
    "ctx_decode",
    "ctx_encode",
    "ctx_index",
    "ctx_model",
    "ctx_survey",
    "ctx_tally",
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
    "merge",
    "read_sum",
    "scatter",
]
