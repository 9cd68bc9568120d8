"""Real vLLM models without an engine: any architecture and any tensor-parallel rank, in this one process.

Does not run a model; only builds it, loads it and describes it. Needs vLLM.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_delta_sync.serving.layout import Layout, trace
from vllm_delta_sync.wire.tensors import TensorSpec

Checkpoint = dict[str, torch.Tensor]

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
_SMALL: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def save_random_checkpoint(kind: str, folder: Path, **changes: Any) -> Checkpoint:
    """Write and return a bf16 checkpoint of transformers' model type `kind`, small and with every element random."""
    config = AutoConfig.for_model(kind, **{**_SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
    model.tie_weights()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def specs_of(checkpoint: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in checkpoint.items()]


def vllm_config_of(folder: Path) -> VllmConfig:
    """The engine configuration for a checkpoint, without a tokenizer."""
    arguments = EngineArgs(
        model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
    )
    return arguments.create_engine_config()


@contextmanager
def one_process() -> Iterator[None]:
    """vLLM's process groups for a world of this process alone."""
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/store", backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def pretend_rank(rank: int, size: int) -> Iterator[None]:
    """Make vLLM believe that this process is one of `size` tensor-parallel ranks. Nothing may communicate meanwhile."""
    group = parallel_state.get_tp_group()
    before = group.world_size, group.rank_in_group
    group.world_size, group.rank_in_group = size, rank
    try:
        yield
    finally:
        group.world_size, group.rank_in_group = before


def build(vllm_config: VllmConfig, rank: int, size: int, *, device: str = "meta") -> torch.nn.Module:
    """The model as rank `rank` of `size` holds it, with uninitialised weights."""
    vllm_config = copy.deepcopy(vllm_config)
    vllm_config.parallel_config.tensor_parallel_size = size
    vllm_config.compilation_config.static_forward_context.clear()
    with (
        pretend_rank(rank, size),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device(device),
    ):
        model = initialize_model(vllm_config)
    return model.eval()


def load(model: torch.nn.Module, checkpoint: Checkpoint, rank: int, size: int) -> None:
    """Load with the model's own loader, from copies: some loaders write to what they are given."""
    with pretend_rank(rank, size):
        model.load_weights((name, tensor.clone()) for name, tensor in checkpoint.items())


def trace_rank(model: torch.nn.Module, checkpoint: Checkpoint, rank: int, size: int) -> Layout:
    with pretend_rank(rank, size):
        return trace(model, specs_of(checkpoint))


def read_region(layout: Layout, model: torch.nn.Module, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(flat checkpoint positions, live elements) of a region, both one-dimensional."""
    region = layout.regions[index]
    flat = layout.flat_tensors(model)[region.storage]
    live = flat.as_strided(region.sizes, region.target_strides, region.target_offset)
    positions = torch.full(region.sizes, region.source_offset, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(region.sizes, region.source_strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64) * stride
        positions += steps.view([-1 if d == dim else 1 for d in range(len(region.sizes))])
    return positions.reshape(-1), live.reshape(-1)
