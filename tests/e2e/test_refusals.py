"""What stops a server at its start, and what it says; each ends within seconds of the cause being known."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.serving import EXTENSION
from vllm_delta_sync import Publisher
from vllm_delta_sync.demo.server import ServerFailed, VllmServer

pytestmark = pytest.mark.e2e


def start(model: Path, log: Path, settings: Any) -> str:
    """Try to serve; returns the log of a server that did not come up."""
    options = {"worker-extension-cls": EXTENSION, "additional-config": {"delta_sync": settings}}
    with pytest.raises(ServerFailed), VllmServer(model, log, options=options):
        pass
    return log.read_text()


def test_a_wrong_base_is_refused_by_name(smollm2: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(smollm2, other)
    state = load_file(str(smollm2 / "model.safetensors"))
    state["model.layers.7.mlp.up_proj.weight"].view(torch.int16)[5, 5] ^= 1
    save_file(state, str(other / "model.safetensors"), metadata={"format": "pt"})
    Publisher.open(f"file://{tmp_path}/bucket", base=other).close()
    log = start(smollm2, tmp_path / "serve.log", {"store": f"file://{tmp_path}/bucket"})
    assert "the served weights are those of no version of this run: 1 of 272 tensors differ" in log
    assert "'model.layers.7.mlp.up_proj.weight'" in log


def test_an_unknown_key_is_refused_with_the_nearest_valid_one(smollm2: Path, tmp_path: Path) -> None:
    settings = {"store": f"file://{tmp_path}/bucket", "poll_intervall_s": 3}
    log = start(smollm2, tmp_path / "serve.log", settings)
    assert "poll_intervall_s" in log and "poll_interval_s" in log and "ConfigError" in log


def test_plugins_that_leave_ours_out_are_named(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    log = start(smollm2, tmp_path / "serve.log", {"store": f"file://{tmp_path}/bucket"})
    assert "VLLM_PLUGINS='something_else' leaves out 'delta_sync'" in log
    assert "VLLM_PLUGINS=something_else,delta_sync" in log
