"""The demo's model: what is built, that it appears whole, and that the padded twin is a twin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from vllm_delta_sync.demo import checkpoint


@pytest.fixture(scope="module")
def tensors(cache_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.smollm2(cache_dir) / checkpoint.WEIGHTS)


def test_the_model_is_smollm2_in_bf16(tensors: dict[str, torch.Tensor]) -> None:
    assert len(tensors) == 272
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008


def test_the_tokenizer_is_lossless_and_knows_the_control_tokens(cache_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint.smollm2(cache_dir) / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is 12 × 345?  naïve…<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == 1 and 2 in ids


def test_the_twin_adds_one_group_of_zeros_and_nothing_else(cache_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    twin = load_file(checkpoint.tp_twin(cache_dir) / checkpoint.WEIGHTS)
    assert twin.keys() == tensors.keys()
    for name, tensor in tensors.items():
        inner = tuple(slice(0, size) for size in tensor.shape)
        assert torch.equal(twin[name][inner], tensor), name
        assert twin[name].count_nonzero() == tensor.count_nonzero(), name
    assert twin["model.layers.0.self_attn.q_proj.weight"].shape == (12 * 64, 576)
    assert twin["model.layers.0.self_attn.k_proj.weight"].shape == (4 * 64, 576)
    assert twin["model.layers.0.self_attn.o_proj.weight"].shape == (576, 12 * 64)


def _first_layers(source: Path, target: Path, layers: int) -> torch.nn.Module:
    """The model cut to its first layers, in fp32."""
    from transformers import AutoModelForCausalLM

    target.mkdir()
    config = json.loads((source / checkpoint.CONFIG).read_text())
    (target / checkpoint.CONFIG).write_text(json.dumps({**config, "num_hidden_layers": layers}))
    shutil.copy(source / checkpoint.WEIGHTS, target)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model


def test_the_twin_computes_the_same_logits_to_the_bit_and_its_zeros_stay_zero(cache_dir: Path, tmp_path: Path) -> None:
    model = _first_layers(checkpoint.smollm2(cache_dir), tmp_path / "model", layers=2)
    twin = _first_layers(checkpoint.tp_twin(cache_dir), tmp_path / "twin", layers=2)
    tokens = torch.arange(64).reshape(2, 32) * 7 + 11
    logits = twin(input_ids=tokens, labels=tokens)
    assert torch.equal(model(input_ids=tokens).logits, logits.logits)
    logits.loss.backward()
    for name, rows in {"q_proj": 9 * 64, "k_proj": 3 * 64, "v_proj": 3 * 64}.items():
        for layer in (0, 1):
            gradient = twin.get_submodule(f"model.layers.{layer}.self_attn.{name}").weight.grad
            assert gradient[:rows].any() and not gradient[rows:].any()
    assert not twin.get_submodule("model.layers.0.self_attn.o_proj").weight.grad[:, 9 * 64 :].any()


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("…")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        checkpoint.build_once(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_what_is_built_already_is_not_built_again(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "built").touch(exist_ok=False)

    first = checkpoint.build_once(tmp_path / "model", build)
    assert checkpoint.build_once(tmp_path / "model", build) == first
    assert [file.name for file in first.iterdir()] == ["built"]


def test_of_two_builders_at_once_the_later_takes_what_the_earlier_built(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def build_while_another_finishes(directory: Path) -> None:
        (directory / "slow").touch()
        target.mkdir()
        (target / "fast").touch()

    assert checkpoint.build_once(target, build_while_another_finishes) == target
    assert [file.name for file in target.iterdir()] == ["fast"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
