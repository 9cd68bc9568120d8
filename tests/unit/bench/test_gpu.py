"""The check of the GPU kernels finds wrong bits; it runs here on the CPU's backends, through the same code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm_delta_sync import kernels
from vllm_delta_sync.bench import gpu

CPU = torch.device("cpu")


def test_it_compares_every_backend_and_times_all_but_the_reference(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--device", "cpu", "--elements", "200000", "--largest-check", "2000", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert 1000 < figures["changed"] < 3000 and figures["copy_gb_s"] > 0
    assert [speed["name"] for speed in figures["backends"]] == [
        backend.name for backend in gpu.backends(CPU) if not backend.name.startswith("reference")
    ]
    assert all(speed["commit_over_limit"] > 0 and speed["hash_share"] > 0 for speed in figures["backends"])


def test_a_kernel_that_writes_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.select("reference", CPU)

    def off_by_one_bit(targets: list[Tensor], *columns: Tensor) -> Tensor:
        outcome = right.scatter_(targets, *columns)
        targets[0][-1] ^= 2
        return outcome

    wrong = dataclasses.replace(right, name="wrong", scatter_=off_by_one_bit)
    monkeypatch.setattr(gpu, "backends", lambda device: [wrong])
    with pytest.raises(AssertionError, match="wrong: scatter of 1 elements of 1 bytes: other bits"):
        gpu.check(CPU, 100)
