"""Fixtures of the publisher's tests: a store that can be made to fail, and a tiny model in training.

Holds no assertions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_training import Training, TroubledStore

from vllm_delta_sync.store import open_store


@pytest.fixture
def store(tmp_path: Path) -> TroubledStore:
    return TroubledStore(open_store(str(tmp_path / "bucket")))


@pytest.fixture
def training() -> Training:
    return Training()
