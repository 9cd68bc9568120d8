"""The check of the GPU kernels finds wrong bits; it runs here on the CPU's backends, through the same code."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.on_host import COMPILER, build
from vllm_delta_sync import kernels
from vllm_delta_sync.bench import gpu
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels import CodedBlock, ctx
from vllm_delta_sync.native.library import Loaded

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def test_it_runs_where_there_is_torch_and_numpy_and_nothing_else_of_what_the_package_needs() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[<>=]", line)[0].replace("-", "_") for line in needed} - {"torch", "numpy"}
    absent = {"yaml" if name == "pyyaml" else name: None for name in names}
    assert "zstandard" in absent and "pydantic" in absent
    code = f"import sys; sys.modules.update({absent}); from vllm_delta_sync.bench import gpu; gpu.main()"
    options = ["--device", "cpu", "--elements", "0", "--largest-check", "40"]
    done = subprocess.run([sys.executable, "-c", code, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "comparisons, all equal" in done.stdout, done.stderr


@pytest.mark.parametrize("before", [None, "installed"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_it_builds_does_not_stay_in_the_source_tree(tmp_path: Path, before: str | None, fails: bool) -> None:
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    folder = tree / "vllm_delta_sync" / "native"
    for made in (folder, tree / "csrc" / "cuda", tree / "csrc" / "cpu", tree / ".ci", tools):
        made.mkdir(parents=True)
    (tree / "csrc" / "cpu" / "abi.cpp").touch()
    (tree / ".ci" / "gpu-check").write_text((ROOT / ".ci" / "gpu-check").read_text())
    library = folder / "libvllm_delta_sync_cpu.so"
    if before:
        library.write_text(before)
    compiler = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho built >"$2"\n'
    python = f'#!/bin/sh\ncase "$1" in -c) echo 90;; *) cat {library} >>{tmp_path}/ran; exit {int(fails)};; esac\n'
    sanitizer = '#!/bin/sh\nshift 4\nexec "$@"\n'
    texts = {"nvcc": compiler, "c++": compiler, "python": python, "compute-sanitizer": sanitizer}
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    known = {"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": str(tools / "python"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", str(tree / ".ci" / "gpu-check")], env=known, capture_output=True, text=True)
    assert (done.returncode != 0) is fails and "built" in (tmp_path / "ran").read_text(), done.stderr
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == ([(library.name, before)] if before else [])


def test_a_gpu_without_the_native_kernels_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernels.backend, "_cuda_library", lambda: Loaded(None, "it does not load"))
    monkeypatch.setattr(gpu, "check", lambda device, most: 99)  # the others agree with each other
    with pytest.raises(ConfigError, match="kernel: native was asked for on cuda, but it does not load"):
        gpu.main(["--device", "cuda", "--elements", "0"])


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
