"""What publishing and staging take is measured in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_delta_sync.cli.bench import app

ELEMENTS = 1 << 23


def test_memory_of_publishing_and_staging(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, ELEMENTS).bfloat16().view(4096, -1)
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        save_file({"weight": weight}, tmp_path / side / "model.safetensors")
        weight.view(-1)[::2] += 0.1
    done = CliRunner().invoke(app, ["memory", str(tmp_path / "old"), str(tmp_path / "new"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["ctx", "gap"]
    slack = 24 << 20  # what allocators and threads keep; and pages of libraries come and go
    for use in found.values():
        publish, stage = use["publish"], use["stage"]
        assert (publish["parameters"], publish["model_bytes"]) == (ELEMENTS, 2 * ELEMENTS)
        assert publish["changed"] == stage["changed"] == ELEMENTS // 2
        assert 1.5 * ELEMENTS < publish["held_bytes"] <= 2 * ELEMENTS + slack
        assert 7 * stage["changed"] < stage["held_bytes"] <= 8 * stage["changed"] + slack
        assert stage["held_bytes"] < stage["peak_bytes"] <= 8 * stage["changed"] + slack
