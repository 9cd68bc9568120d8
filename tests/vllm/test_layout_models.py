"""The map of real vLLM models, against what their real loaders write, at several tensor-parallel sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from tests.vllm.engine_free import (
    Checkpoint,
    build,
    load,
    one_process,
    pretend_rank,
    read_region,
    save_random_checkpoint,
    specs_of,
    trace_rank,
    vllm_config_of,
)
from vllm_delta_sync.errors import UnsupportedEngine, UnsupportedLayout
from vllm_delta_sync.serving.coverage import cover
from vllm_delta_sync.serving.layout import Layout
from vllm_delta_sync.serving.platform_cpu import keep_weights_patchable

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, **EXPERTS}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 8,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_process():
        yield


def saved(name: str, folder: Path) -> tuple[Checkpoint, VllmConfig]:
    kind, changes = MODELS[name]
    checkpoint = save_random_checkpoint(kind, folder, **changes)
    return checkpoint, vllm_config_of(folder)


def digest(model: torch.nn.Module) -> str:
    tensors = (*model.parameters(), *model.buffers())
    whole = (torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in tensors)
    return hashlib.sha256(b"".join(bits.numpy().tobytes() for bits in whole)).hexdigest()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.int16)


def assert_read_back(layout: Layout, model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Each live element that a region names has the bits of the checkpoint element that it names."""
    for index, region in enumerate(layout.regions):
        positions, live = read_region(layout, model, index)
        expected = checkpoint[region.tensor].reshape(-1)[positions]
        assert torch.equal(bits(live.to(expected.dtype)), bits(expected)), region
        assert torch.equal(live, expected.to(live.dtype)), region


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_mapped_to_where_the_real_loader_puts_it(name: str, size: int, tmp_path: Path) -> None:
    checkpoint, config = saved(name, tmp_path)
    layouts = []
    for rank in range(size):
        model = build(config, rank, size, device="cpu")
        load(model, checkpoint, rank, size)
        before = digest(model)
        layout = trace_rank(model, checkpoint, rank, size)
        assert digest(model) == before
        layout.places(model).assert_unmoved()
        assert layout.unsupported == ()
        assert_read_back(layout, model, checkpoint)
        assert trace_rank(build(config, rank, size), checkpoint, rank, size).regions == layout.regions
        layouts.append(layout)
    specs = specs_of(checkpoint)
    coverage = cover([layout.regions for layout in layouts], specs)
    assert coverage.unmapped == ()
    canonical = [layouts[rank].regions[index] for rank, index in (group.members[0] for group in coverage.groups)]
    assert sum(region.numel for region in canonical) == sum(spec.numel for spec in specs)


def test_key_value_heads_fewer_than_ranks_are_copies(tmp_path: Path) -> None:
    checkpoint, config = saved("llama", tmp_path)
    size = 8
    layouts = [trace_rank(build(config, rank, size), checkpoint, rank, size) for rank in range(size)]
    coverage = cover([layout.regions for layout in layouts], specs_of(checkpoint))
    keys = [group for group in coverage.groups if group.tensor == "model.layers.0.self_attn.k_proj.weight"]
    assert [[rank for rank, _ in group.members] for group in keys] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_table_saved_beside_the_one_it_is_tied_to_is_not_mapped(tmp_path: Path) -> None:
    checkpoint, config = saved("llama-tied", tmp_path)
    checkpoint["lm_head.weight"] = checkpoint["model.embed_tokens.weight"].clone()
    layout = trace_rank(build(config, 0, 1), checkpoint, 0, 1)
    assert (layout.unmapped, layout.unsupported) == (("lm_head.weight",), ())


def test_a_weight_that_the_loader_transforms_is_unsupported_by_name(tmp_path: Path) -> None:
    checkpoint = save_random_checkpoint(
        "mamba2", tmp_path, num_heads=8, head_dim=16, n_groups=2, expand=2, state_size=16, tie_word_embeddings=True
    )
    config = vllm_config_of(tmp_path)
    model = build(config, 0, 1, device="cpu")
    load(model, checkpoint, 0, 1)
    before = digest(model)
    layout = trace_rank(model, checkpoint, 0, 1)
    assert digest(model) == before
    assert [name for name, _ in layout.unsupported] == [f"backbone.layers.{i}.mixer.A_log" for i in range(2)]
    assert_read_back(layout, model, checkpoint)


def test_a_checkpoint_of_another_architecture_is_refused_with_the_loaders_error(tmp_path: Path) -> None:
    checkpoint, config = saved("llama", tmp_path)
    checkpoint["model.layers.7.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedLayout, match=r"model\.layers\.7\.mlp\.down_proj\.weight"):
        trace_rank(build(config, 0, 1), checkpoint, 0, 1)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "deepseek-v3"])
def test_weights_stay_where_they_were_loaded_when_vllm_prepares_them_on_cpu(name: str, tmp_path: Path) -> None:
    assert keep_weights_patchable() == keep_weights_patchable()
    kind, changes = MODELS[name]
    if "moe_intermediate_size" in changes:
        changes = {**changes, "moe_intermediate_size": 80}  # which the expert kernel pads to 96
    checkpoint = save_random_checkpoint(kind, tmp_path, **changes)
    config = vllm_config_of(tmp_path)
    model = build(config, 0, 1, device="cpu")
    load(model, checkpoint, 0, 1)
    with pretend_rank(0, 1):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    layout = trace_rank(model, checkpoint, 0, 1)
    assert (layout.unmapped, layout.unsupported) == ((), ())
    assert_read_back(layout, model, checkpoint)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"),
        ("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "cpu_fused_moe"),
    ],
)
def test_a_vllm_without_the_function_to_replace_is_refused_by_its_name(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"{module}.{name}")
    with pytest.raises(UnsupportedEngine, match=name):
        keep_weights_patchable()


def test_experts_packed_at_each_call_compute_what_experts_packed_once_do() -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    assert keep_weights_patchable()
    generator = torch.Generator().manual_seed(1)
    shapes = (3, 64), (4, 64, 64), (4, 64, 32)
    hidden, w13, w2 = ((torch.randn(shape, generator=generator) / 8).to(torch.bfloat16) for shape in shapes)
    weights, ids = torch.rand(3, 2, generator=generator), torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    isa = cpu_moe.CPUUnquantizedExperts.isa
    once, each = torch.zeros_like(hidden), torch.zeros_like(hidden)
    packed = [ops.cpu_prepack_moe_weight(weight, isa) for weight in (w13, w2)]
    ops.cpu_fused_moe(once, hidden, *packed, None, None, weights, ids, "silu", isa)
    cpu_moe.cpu_fused_moe(
        each,
        hidden,
        *(cpu_moe.cpu_prepack_moe_weight(weight, isa) for weight in (w13, w2)),
        None,
        None,
        weights,
        ids,
        "silu",
        isa,
    )
    assert torch.equal(once, each) and once.abs().sum() > 0
    assert not torch.equal(packed[0], w13), "if packing changed nothing, this test would show nothing"
