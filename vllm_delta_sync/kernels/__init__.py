"""The device kernels as torch operators: patch live weights, hash them.

Importing it registers `torch.ops.vllm_delta_sync`. Does not know the log, the store or vLLM.
"""

from __future__ import annotations

from vllm_delta_sync.kernels import ops
from vllm_delta_sync.kernels.backend import Backend, Patch, Policy, select

__all__ = ["Backend", "Patch", "Policy", "ops", "select"]
