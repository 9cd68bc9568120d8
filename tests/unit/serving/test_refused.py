"""Engines whose weights a commit would not reach, or not as a whole, are refused before they load a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_sync.errors import UnsupportedEngine
from vllm_delta_sync.serving import engine


def config(*, sleep: bool = False, moe: bool = False, **parallel: Any) -> SimpleNamespace:
    """Of vLLM, as far as it is looked at."""
    usual = {"worker_extension_cls": engine.EXTENSIONS[0], "enable_expert_parallel": False, "data_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep, is_moe=moe),
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
