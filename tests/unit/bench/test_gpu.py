"""The check of the GPU kernels finds wrong bits; it runs here on the CPU's backends, through the same code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.on_host import COMPILER, build
from vllm_delta_sync import kernels
from vllm_delta_sync.bench import gpu
from vllm_delta_sync.kernels import CodedBlock, ctx

CPU = torch.device("cpu")


def test_it_compares_every_backend_and_times_all_but_the_reference(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--device", "cpu", "--elements", "200000", "--largest-check", "2000", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert 1000 < figures["changed"] < 3000 and figures["copy_gb_s"] > 0 and figures["upload_gb_s"] > 0
    assert [speed["name"] for speed in figures["backends"]] == [
        backend.name for backend in gpu.backends(CPU) if not backend.name.startswith("reference")
    ]
    assert all(speed["commit_over_limit"] > 0 and speed["hash_share"] > 0 for speed in figures["backends"])


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine to compile the kernels with")
def test_where_a_device_decodes_its_tiles_are_compared_damaged_ones_too_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path)
    made = dataclasses.replace(
        kernels.select("auto", CPU), name="on the host", decode_tiles=lambda blocks: ctx.decode(library, blocks, 0)
    )
    monkeypatch.setattr(gpu, "backends", lambda device: [made])
    monkeypatch.setattr(gpu, "_library", lambda: library)
    out = tmp_path / "gpu.json"
    gpu.main(["--device", "cpu", "--elements", "90000", "--largest-check", "2000", "--out", str(out)])
    (speed,) = json.loads(out.read_text())["backends"]
    assert 0.003 < speed["decode"]["changed"] / 90_000 < 0.03
    assert min(speed["decode"].values()) > 0 and speed["diff_gb_s"] > 0

    def of_another_step(blocks: list[CodedBlock]) -> list[ctx.Decoded | None]:
        return [
            None if one is None else (one[0], one[1] + one[1].dtype.type(1)) for one in ctx.decode(library, blocks, 0)
        ]

    monkeypatch.setattr(gpu, "backends", lambda device: [dataclasses.replace(made, decode_tiles=of_another_step)])
    with pytest.raises(AssertionError, match=r"on the host: ctx tiles of .* rows of .*, 1 bytes each"):
        gpu.check(CPU, 100)


def test_a_kernel_that_writes_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.select("reference", CPU)

    def off_by_one_bit(patch: kernels.Prepared) -> Tensor:
        outcome = right.write(patch)
        patch.targets[0][-1] ^= 2
        return outcome

    wrong = dataclasses.replace(right, name="wrong", write=off_by_one_bit)
    monkeypatch.setattr(gpu, "backends", lambda device: [wrong])
    with pytest.raises(AssertionError, match="wrong: scatter of 1 elements of 1 bytes: other bits"):
        gpu.check(CPU, 100)
