"""The demo's comparisons see what they are there to see: one wrong bit, one missing element."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_delta_sync.demo import check
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=random) for name, shape in {"b": (6, 4), "a": (5,)}.items()}


def _hashes(state: dict[str, torch.Tensor]) -> list[str]:
    found = []
    for name in sorted(state):
        bits = state[name].to(torch.bfloat16).view(torch.uint16).numpy()
        lanes = state_hash.of_tensor(TensorSpec(name=name, dtype="BF16", shape=bits.shape), bits.reshape(-1))
        found.append(state_hash.to_hex(lanes))
    return found


def test_equal_hashes_are_equal(state: dict[str, torch.Tensor]) -> None:
    assert check.differing_hashes(_hashes(state), state) == []


def test_a_change_of_one_bf16_step_is_named(state: dict[str, torch.Tensor]) -> None:
    found = _hashes(state)
    state["b"][2, 1] *= 1 + 2**-7
    assert check.differing_hashes(found, state) == ["b"]


def test_a_change_below_bf16_is_no_difference(state: dict[str, torch.Tensor]) -> None:
    state = {name: tensor.to(torch.bfloat16).float() for name, tensor in state.items()}
    found = _hashes(state)
    state["b"][2, 1] *= 1 + 2**-12
    assert check.differing_hashes(found, state) == []


def test_a_missing_tensor_is_a_difference(state: dict[str, torch.Tensor]) -> None:
    assert check.differing_hashes(_hashes(state)[:1], state) != []


def _dump(folder: Path, rank: int, boxes: list[tuple[str, list[list[int]], np.ndarray]]) -> None:
    regions, raw = [], b""
    for name, box, bits in boxes:
        data = bits.tobytes()
        regions.append({"tensor": name, "dtype": "BF16", "box": box, "offset": len(raw), "nbytes": len(data)})
        raw += data
    (folder / f"rank{rank}.bin").write_bytes(raw)
    (folder / f"rank{rank}.json").write_text(json.dumps({"version": 1, "regions": regions}))


def _two_ranks(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """`b` split by rows over two ranks, `a` on both."""
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    a, b = cast["a"].view(torch.uint16).numpy(), cast["b"].view(torch.uint16).numpy()
    _dump(folder, 0, [("a", [[0, 5]], a), ("b", [[0, 3], [0, 4]], b[:3])])
    _dump(folder, 1, [("b", [[3, 6], [0, 4]], b[3:]), ("a", [[0, 5]], a)])
    save_file(cast, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_equal_bytes_are_equal(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    assert check.differing_bytes(tmp_path, 2, _two_ranks(tmp_path, state)) == []


def test_one_wrong_bit_in_one_copy_is_named(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    weights = _two_ranks(tmp_path, state)
    raw = bytearray((tmp_path / "rank1.bin").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "rank1.bin").write_bytes(raw)
    assert check.differing_bytes(tmp_path, 2, weights) == ["a"]


def test_an_element_that_is_live_nowhere_is_named(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    weights = _two_ranks(tmp_path, state)
    assert check.differing_bytes(tmp_path, 1, weights) == ["b"]


def test_an_exported_file_must_hold_the_trainers_tensors_and_no_others(tmp_path: Path) -> None:
    state = {"a": torch.randn(4, 3), "b": torch.tensor([-0.0, 1.0])}
    weights = tmp_path / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, weights)
    assert check.differing_tensors(weights, state) == []
    assert check.differing_tensors(weights, {**state, "b": torch.tensor([0.0, 1.0])}) == ["b"]
    assert check.differing_tensors(weights, {"a": state["a"]}) == ["b"]
