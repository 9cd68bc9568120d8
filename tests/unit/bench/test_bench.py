"""The measurements: what they take as input, and what they report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_delta_sync.bench import apply, hash
from vllm_delta_sync.bench.clock import interleaved
from vllm_delta_sync.errors import BaseMismatch


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_contenders_take_turns() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 3
    assert seconds.keys() == {"a", "b"} and all(value > 0 for value in seconds.values())


def test_a_step_is_the_bits_that_differ(tmp_path: Path) -> None:
    weight = torch.arange(100, dtype=torch.bfloat16)
    changed = weight.clone()
    changed[[3, 70]] = -1
    old = checkpoint(tmp_path / "old", a=weight, b=torch.tensor([0.0]).bfloat16())
    new = checkpoint(tmp_path / "new", a=changed, b=torch.tensor([-0.0]).bfloat16())
    step = apply.read_step(old, new)
    assert [change.positions.tolist() for change in step.changes] == [[3, 70], [0]]
    assert step.changed == 3


def test_checkpoints_that_cannot_be_one_step_are_refused(tmp_path: Path) -> None:
    weight = torch.zeros(4, dtype=torch.bfloat16)
    old = checkpoint(tmp_path / "old", a=weight)
    with pytest.raises(BaseMismatch, match="nothing to apply"):
        apply.read_step(old, old)
    with pytest.raises(BaseMismatch, match="different tensors"):
        apply.read_step(old, checkpoint(tmp_path / "other", b=weight))
    with pytest.raises(BaseMismatch, match="want bf16 tensors of one shape"):
        apply.read_step(old, checkpoint(tmp_path / "wide", a=weight.float()))


def test_the_hash_is_reported_beside_the_read_speed(tmp_path: Path) -> None:
    speed = hash.measure(checkpoint(tmp_path / "one", a=torch.zeros(100_000, dtype=torch.bfloat16)), rounds=1)
    assert asdict(speed).keys() == {"hash_gb_s", "read_gb_s"}
    assert min(speed.hash_gb_s, speed.read_gb_s) > 0
