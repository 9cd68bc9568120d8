"""Models for the end-to-end tests, built once into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_delta_sync.demo import checkpoint


@pytest.fixture(scope="session")
def smollm2(cache_dir: Path) -> Path:
    """SmolLM2-135M, bf16."""
    return checkpoint.smollm2(cache_dir)


@pytest.fixture(scope="session")
def twin(cache_dir: Path) -> Path:
    """The same with a fourth KV head of zeros, which tensor parallelism can split."""
    return checkpoint.tp_twin(cache_dir)
