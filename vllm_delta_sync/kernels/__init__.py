"""The device kernels as torch operators: patch live weights, hash them, find what changed.

Importing it registers `torch.ops.vllm_delta_sync`. Does not know the log, the store or vLLM.
"""

from __future__ import annotations

from vllm_delta_sync.kernels import ops
from vllm_delta_sync.kernels.arena import Arena
from vllm_delta_sync.kernels.backend import Backend, DecodeTiles, Policy, select
from vllm_delta_sync.kernels.ctx import CodedBlock, Decoded
from vllm_delta_sync.kernels.patch import Patch, Prepared

__all__ = ["Arena", "Backend", "CodedBlock", "DecodeTiles", "Decoded", "Patch", "Policy", "Prepared", "ops", "select"]
