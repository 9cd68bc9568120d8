"""Engines that come to what is published in other ways than `vllm serve` that catches up first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.e2e.serving import Model, serving, until_served
from vllm_delta_sync import Publisher

pytestmark = pytest.mark.e2e

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
