"""What stops a server at its start, and what it says; each ends within seconds of the cause being known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.serving import EXTENSION, Model, serving, until_served
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


IN_PROCESS = """
import json, sys
from vllm import LLM, SamplingParams
model, bucket, new = sys.argv[1:]
llm = LLM(model, dtype="bfloat16", max_model_len=256, enforce_eager=True,
          worker_extension_cls="vllm_delta_sync.WorkerExtension",
          additional_config={"delta_sync": {"store": bucket, "poll_interval_s": 0.1}})
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
status = lambda: llm.collective_rpc("delta_sync_status")[0]["version"]
said = [status()]
from safetensors.torch import load_file
from vllm_delta_sync import Publisher
with Publisher.open(bucket, resume=True) as publisher:
    publisher.publish(load_file(new)).result(60)
for _ in range(600):
    llm.generate(["The harbour"], greedy, use_tqdm=False)
    if status() == 2:
        break
said.append(status())
text = llm.generate(["The harbour"], greedy, use_tqdm=False)[0].outputs[0].text
print("SAID", json.dumps([said, text]))
"""


def test_an_engine_in_the_callers_own_process_commits_before_a_step(smollm2: Path, tmp_path: Path) -> None:
    bucket, model = f"file://{tmp_path}/bucket", Model(smollm2)
    with Publisher.open(bucket, base=smollm2) as publisher:
        model.step()
        publisher.publish(model.state)
    model.step()
    new = tmp_path / "model.safetensors"
    save_file(model.state, str(new))
    here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(smollm2), bucket, str(new)],
        env={**os.environ, **here}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert "SAID [[1, 2]" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_serving_at_once_follows_later(smollm2: Path, tmp_path: Path) -> None:
    bucket, model = tmp_path / "bucket", Model(smollm2)
    with Publisher.open(f"file://{bucket}", base=smollm2) as publisher:
        model.step()
        publisher.publish(model.state)
    with serving(smollm2, bucket, tmp_path / "serve.log", start="serve_base") as server:
        until_served(server, 1)
        assert "catching up" not in server.log.read_text()
