"""Keeps vLLM's CPU backend from packing weights, so that the parameters one sees are those that are computed with.

Does nothing on other platforms, where unquantised weights stay as they were loaded.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from vllm_delta_sync.errors import UnsupportedEngine

_LINE = (
    "vLLM's packing of weights on CPU is off, so that they can be patched in place: linear layers run as plain torch "
    "linear, experts are packed anew at each call"
)


def keep_weights_patchable() -> str | None:
    """Turn packing off for every model loaded by this process from now on; may be called again.

    vLLM's CPU backend otherwise replaces the weight of a linear layer by an empty tensor and computes with a packed
    copy, and stores expert weights in another order under the same shape. The price is speed: packing experts is work
    of the size of the layer, at every step.

    Returns:
        The line to log, or None when this is not vLLM's CPU platform.

    Raises:
        UnsupportedEngine: this vLLM has not got what is to be replaced.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    _plain_linear()
    _pack_experts_per_call()
    return _LINE


def _plain_linear() -> None:
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    _probe(utils, "dispatch_cpu_unquantized_gemm")
    for module in (utils, linear, vocab_parallel_embedding):
        # The callers import it when they call it; a release that imports it at the top is served as well.
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = _use_torch_linear


def _use_torch_linear(layer: Any, remove_weight: bool) -> None:
    """What vLLM itself falls back to where it has no packed kernel; `remove_weight` is about the packed copy."""
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


def _pack_experts_per_call() -> None:
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError as error:
        raise UnsupportedEngine(
            f"this vLLM keeps its CPU experts elsewhere than in fused_moe/experts/cpu_moe.py ({error}); "
            "vllm-delta-sync supports vLLM 0.29 to 0.33"
        ) from None
    pack, run = _probe(cpu_moe, "cpu_prepack_moe_weight"), _probe(cpu_moe, "cpu_fused_moe")
    if pack is _leave_as_loaded:
        return
    cpu_moe.cpu_prepack_moe_weight = _leave_as_loaded

    @functools.wraps(run)
    def packing(out: Any, hidden: Any, w13: Any, w2: Any, b13: Any, b2: Any, *rest: Any) -> None:
        isa = rest[3]  # after the routing weights, the routing ids and the activation
        run(out, hidden, pack(w13, isa), pack(w2, isa), b13, b2, *rest)

    cpu_moe.cpu_fused_moe = packing


def _leave_as_loaded(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """Stands in for `cpu_prepack_moe_weight`: `isa` says for which instructions to pack."""
    del isa
    return weight


def _probe(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found):
        raise UnsupportedEngine(
            f"{module.__name__}.{name} is missing in this vLLM, so the CPU backend's weight packing cannot be turned "
            "off; vllm-delta-sync supports vLLM 0.29 to 0.33"
        )
    return found
