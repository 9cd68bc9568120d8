"""Engines whose weights a commit would not reach, or not as a whole, are refused before they load a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_delta_sync import kernels
from vllm_delta_sync.errors import UnsupportedEngine, UnsupportedLayout
from vllm_delta_sync.serving import engine
from vllm_delta_sync.serving.memory import LiveMemory


def config(*, sleep: bool = False, moe: bool = False, group: int = 0, **parallel: Any) -> SimpleNamespace:
    """Of vLLM, as far as it is looked at."""
    usual = {"worker_extension_cls": engine.EXTENSIONS[0], "enable_expert_parallel": False, "data_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep, is_moe=moe),
        offload_config=SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=group)),
        parallel_config=SimpleNamespace(**{**usual, "decode_context_parallel_size": 1, **parallel}),
    )


@pytest.fixture(autouse=True)
def plugin_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_installed", True)
    monkeypatch.setattr(engine, "_problem", None)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (config(sleep=True), "--enable-sleep-mode takes the weights away"),
        (config(group=4), "buffers that layers share"),
        (config(decode_context_parallel_size=2, dcp_q_replicate=True), "keeps a copy of weights"),
        (config(data_parallel_size=2, enable_expert_parallel=True), "one forward over all replicas"),
        (config(data_parallel_size=2, moe=True), "one forward over all replicas"),
        (config(worker_extension_cls="mine.Extension"), "derives from WorkerExtension"),
    ],
)
def test_what_commits_cannot_serve_rightly_is_refused_by_name(refused: SimpleNamespace, why: str) -> None:
    with pytest.raises(UnsupportedEngine, match=why):
        engine.require_installed(refused, {})


@pytest.mark.parametrize(
    "fine", [config(), config(decode_context_parallel_size=2, dcp_q_replicate=False), config(data_parallel_size=2)]
)
def test_what_they_can_is_not(fine: SimpleNamespace) -> None:
    engine.require_installed(fine, {"VLLM_PLUGINS": "other, delta_sync"})


def test_weights_on_another_device_than_the_kernels_are_refused_before_anything_is_staged() -> None:
    here, there = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedLayout, match="weights lie on meta besides cpu"):
        LiveMemory([here, there], kernels.select("auto", here.device))
