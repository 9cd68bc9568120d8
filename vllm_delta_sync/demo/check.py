"""Compares what a server has in its live memory with what the trainer has: once by state hash, once byte for byte.

Does not talk to the server. The byte-for-byte road shares no code with the hash, the log or the layout: it reads a
safetensors file and raw dumps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec


def differing_hashes(found: Sequence[str], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors whose live hash is not that of the trainer's tensor, cast to bf16 as torch casts.

    Args:
        found: of every tensor in the order of names (as UTF-8), its lanes as 32 hex digits, by a full pass over live
            memory.
        state: the trainer's tensors by name.
    """
    names = sorted(state, key=str.encode)
    if len(found) != len(names):
        return [f"(the server hashed {len(found)} tensors, the trainer has {len(names)})"]
    wrong = []
    for name, lanes in zip(names, found, strict=True):
        bits = state[name].detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
        spec = TensorSpec(name=name, dtype="BF16", shape=tuple(bits.shape))
        if state_hash.to_hex(state_hash.of_tensor(spec, bits.reshape(-1))) != lanes:
            wrong.append(name)
    return wrong


def differing_tensors(weights: Path, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors of a file that are not, bit for bit, the trainer's, cast to bf16 as torch casts."""
    with safe_open(weights, framework="pt") as file:
        names = set(file.keys())
        return sorted(
            (names ^ state.keys())
            | {
                name
                for name in names & state.keys()
                if not torch.equal(
                    file.get_tensor(name).view(torch.int16), state[name].detach().to(torch.bfloat16).view(torch.int16)
                )
            }
        )


def differing_bytes(dumps: Path, ranks: int, weights: Path) -> list[str]:
    """Names of the tensors of which a live copy differs from the file, or of which some element is live on no rank.

    Args:
        dumps: folder with `rank<r>.json` ({regions: [{tensor, dtype, box, offset, nbytes}]}) and `rank<r>.bin`.
        ranks: how many there must be.
        weights: the safetensors file that every box is compared with.
    """
    wrong: set[str] = set()
    with safe_open(weights, framework="pt") as file:
        expected = {name: file.get_tensor(name).view(torch.uint16).numpy() for name in file.keys()}  # noqa: SIM118
    live = {name: np.zeros(bits.shape, dtype=bool) for name, bits in expected.items()}
    for rank in range(ranks):
        index = json.loads((dumps / f"rank{rank}.json").read_text())
        raw = np.fromfile(dumps / f"rank{rank}.bin", dtype=np.uint8)
        for region in index["regions"]:
            name = region["tensor"]
            box = tuple(slice(start, stop) for start, stop in region["box"])
            data = raw[region["offset"] : region["offset"] + region["nbytes"]]
            if region["dtype"] != "BF16" or data.tobytes() != expected[name][box].tobytes():
                wrong.add(name)
            live[name][box] = True
    wrong |= {name for name, covered in live.items() if not covered.all()}
    return sorted(wrong)
