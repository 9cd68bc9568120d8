"""The measurements: what they take as input, and what they report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_delta_sync.bench import apply, clock, data, fetch, hash, step
from vllm_delta_sync.errors import BaseMismatch, ConfigError


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_contenders_take_turns_in_which_quick_ones_run_more_often() -> None:
    order: list[str] = []

    def slow() -> None:
        order.append("slow")
        time.sleep(clock.TURN_SECONDS)

    seconds = clock.interleaved({"quick": lambda: order.append("quick"), "slow": slow}, rounds=3)
    assert order == [*["quick"] * clock.TURN_RUNS, "slow"] * 3
    assert 0 < seconds["quick"] < clock.TURN_SECONDS <= seconds["slow"]


def test_a_step_is_the_bits_that_differ(tmp_path: Path) -> None:
    weight = torch.arange(100, dtype=torch.bfloat16)
    changed = weight.clone()
    changed[[3, 70]] = -1
    old = checkpoint(tmp_path / "old", a=weight, b=torch.tensor([0.0]).bfloat16())
    new = checkpoint(tmp_path / "new", a=changed, b=torch.tensor([-0.0]).bfloat16())
    found = apply.read_step(old, new)
    assert [change.positions.tolist() for change in found.changes] == [[3, 70], [0]]
    assert found.changed == 3


def test_checkpoints_that_cannot_be_one_step_are_refused(tmp_path: Path) -> None:
    weight = torch.zeros(4, dtype=torch.bfloat16)
    old = checkpoint(tmp_path / "old", a=weight)
    with pytest.raises(BaseMismatch, match="no update to measure"):
        step.read(old, old)
    with pytest.raises(BaseMismatch, match=r"'a' is TensorSpec.* in .*old and nothing in"):
        step.read(old, checkpoint(tmp_path / "other", b=weight))
    wide = checkpoint(tmp_path / "wide", a=weight.float())
    with pytest.raises(BaseMismatch, match="give two checkpoints of one model"):
        step.read(old, wide)
    with pytest.raises(BaseMismatch, match="bf16 tensors only"):
        apply.read_step(wide, checkpoint(tmp_path / "wider", a=weight.float() + 1))


def test_the_hash_is_reported_beside_the_read_speed(tmp_path: Path) -> None:
    speed = hash.measure(checkpoint(tmp_path / "one", a=torch.zeros(100_000, dtype=torch.bfloat16)), rounds=1)
    assert asdict(speed).keys() == {"hash_gb_s", "read_gb_s"}
    assert min(speed.hash_gb_s, speed.read_gb_s) > 0


def test_two_nodes_fetch_what_each_of_them_holds(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(2) for kind in ("q_proj", "o_proj")]
    old = {name: torch.randn(2048, 1024).bfloat16() for name in names}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor.view(-1)[::50] += 1
    nodes = fetch.measure(checkpoint(tmp_path / "old", **old), checkpoint(tmp_path / "new", **new))
    shares = {(node.layout, node.node): node.fetched / node.update for node in nodes}
    assert shares == pytest.approx(
        {
            **{("pipeline", node): 0.5 for node in range(2)},
            **{("rows", node): 0.5 for node in range(2)},
            **{("rows and columns", node): 0.75 for node in range(2)},
        },
        rel=0.05,
    )
    assert all(node.fetched <= 1.1 * node.needed for node in nodes)


def test_a_jittered_number_is_anywhere_in_its_rounding_cell_and_rounds_to_itself() -> None:
    every = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite() & (every.abs() < 1e38)]
    moved = data.jittered(finite, torch.Generator().manual_seed(3))
    back = moved.to(torch.bfloat16)
    assert torch.equal(back, finite) and torch.equal(back.view(torch.int16) == finite.view(torch.int16), finite != 0)
    assert (moved > finite.float()).float().mean() == pytest.approx(0.5, abs=0.02)


def test_data_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cold, warm, sparse, dense"):
        data.made("hot", tmp_path)
