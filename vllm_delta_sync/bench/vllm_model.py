"""A vLLM model in this process without an engine, for vLLM's own way of patching weights.

Serves nothing: it exists to be patched.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vllm_delta_sync.errors import ConfigError

Weights = Iterable[tuple[str, torch.Tensor]]


def build(checkpoint: Path, weights: Weights) -> Any:
    """The checkpoint's architecture at TP=1 on the CPU, loaded with `weights` through its own loader; an nn.Module.

    Raises:
        ConfigError: vLLM is not installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # stdout is the command's own
    try:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model
    except ImportError as error:
        raise ConfigError(f"measuring vLLM's own patching needs vLLM in this environment: {error}") from error
    config = EngineArgs(model=str(checkpoint), dtype="bfloat16", enforce_eager=True).create_engine_config()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/rendezvous", backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(default)
        model.load_weights(weights)
    return model.eval()


def close() -> None:
    """Take down the process groups that `build` made."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
