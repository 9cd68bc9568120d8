"""The base of a run: its tensors as bits, and how receivers can find the same checkpoint.

Does not download: a Hub id is looked up in the local Hugging Face cache. Does not write to the log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download

from vllm_delta_sync.errors import ConfigError, LogError, NotFound
from vllm_delta_sync.trainer import source
from vllm_delta_sync.wire.checkpoint import config_files, open_checkpoint
from vllm_delta_sync.wire.manifest import BaseRef
from vllm_delta_sync.wire.tensors import TensorSpec

Tensors = dict[str, tuple[TensorSpec, source.Bits]]


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What version 0 of a run holds and is called."""

    tensors: Tensors  # name → (spec, bits uW[numel]), nobody else's memory
    aliases: Mapping[str, str]  # tied name → the name among the tensors that it stands for
    ref: BaseRef | None  # a checkpoint with exactly these tensors; None when none is known
    why_not: str  # why none is known; empty when one is
    files: Mapping[str, bytes]  # config, tokenizer and the like, by file name, for a checkpoint of these tensors


def from_path(path: str | os.PathLike[str], revision: str | None) -> Base:
    """The base that is a checkpoint directory, or a Hub id (`name` or `name@revision`) in the local Hugging Face cache.

    Raises ConfigError when there is no such directory or cache entry, MalformedObject when its files are damaged.
    """
    found = locate(str(path), revision)
    if found is None:
        raise ConfigError(
            f"base {str(path)!r} is neither a directory nor in the local Hugging Face cache; "
            "download it first (hf download), or give the model itself"
        )
    directory, ref = found
    checkpoint = open_checkpoint(directory)
    tensors: Tensors = {name: (spec, np.array(bits)) for name, (spec, bits) in checkpoint.items()}
    return Base(tensors, {}, ref, "", {file.name: file.read_bytes() for file in config_files(directory)})


def from_weights(
    weights: source.Weights, dtype: torch.dtype | None, model_id: str | None, revision: str | None
) -> Base:
    """The base that is a model in memory, published with fp32 and fp64 as `dtype` (None: as they are).

    A checkpoint is its `ref` only when its names, dtypes, shapes and every bit were compared and are the same. Looked
    at: `model_id`, else the path or id that a transformers model was loaded from.

    Raises ConfigError for weights that cannot be published.
    """
    state = weights if isinstance(weights, torch.nn.Module | Mapping) else dict(weights)
    unique, aliases = source.untie(source.state_of(state))
    tensors: Tensors = {}
    for name, tensor in unique.items():
        spec = source.spec_of(name, tensor, dtype)
        tensors[name] = spec, source.read_bits(tensor, spec, 0, spec.numel)
    if not tensors:
        raise ConfigError("the base has no tensors; give a model, its state dict or a checkpoint directory")
    config = getattr(weights, "config", None)
    candidate = model_id or getattr(config, "_name_or_path", None)
    found = locate(candidate, revision) if candidate else None
    files = {file.name: file.read_bytes() for file in config_files(found[0])} if found else {}
    files.update(config_of(weights, tensors))
    if not candidate:
        why_not = "no model_id was given and the model does not say where it was loaded from"
    elif found is None:
        why_not = f"{candidate!r} is neither a directory nor in the local Hugging Face cache"
    else:
        why_not = difference(found[0], tensors)
    return Base(tensors, aliases, found[1] if found and not why_not else None, why_not, files)


def locate(name: str, revision: str | None) -> tuple[Path, BaseRef] | None:
    """The directory and reference of a checkpoint given by path or Hub id (`name@revision` too); None if not here."""
    if Path(name).is_dir():
        return Path(name).resolve(), BaseRef(model=str(Path(name).resolve()))
    name, _, pinned = name.partition("@")
    try:
        directory = Path(snapshot_download(name, revision=pinned or revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no id at all
        return None
    return directory, BaseRef(model=name, revision=directory.name)


def difference(directory: Path, tensors: Tensors) -> str:
    """How a checkpoint differs from these tensors, in words; empty when it holds exactly them, bit for bit."""
    try:
        checkpoint = open_checkpoint(directory)
        if checkpoint.keys() != tensors.keys():
            return f"{directory} lacks or adds tensor {min(checkpoint.keys() ^ tensors.keys())!r}"
        for name, (spec, bits) in tensors.items():
            stored, stored_bits = checkpoint[name]
            if stored != spec:
                return (
                    f"{name} is {stored.dtype} {list(stored.shape)} in {directory}, not {spec.dtype} {list(spec.shape)}"
                )
            if not np.array_equal(stored_bits, bits):
                return f"{name} has other values in {directory}"
    except (LogError, NotFound, OSError) as error:
        return f"{directory} cannot be read ({error})"
    return ""


def config_of(weights: source.Weights, tensors: Tensors) -> dict[str, bytes]:
    """config.json and generation_config.json of a transformers model, as its `save_pretrained` would write them."""
    config: Any = getattr(weights, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    fields = json.loads(config.to_json_string())
    fields["architectures"] = fields.get("architectures") or [type(weights).__name__]
    if {spec.dtype for spec, _ in tensors.values()} == {"BF16"}:  # vLLM reads the weights' dtype from here
        fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = "bfloat16"
    files = {"config.json": json.dumps(fields, indent=2, sort_keys=True).encode()}
    generation: Any = getattr(weights, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    return files
