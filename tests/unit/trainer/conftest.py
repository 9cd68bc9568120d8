"""Fixtures of the publisher's tests: a store that can be made to fail, and a tiny model in training.

Holds no assertions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(next(parent for parent in Path(__file__).parents if parent.name == "tests")))

from tiny_training import Training, TroubledStore

from vllm_delta_sync.store import open_store


@pytest.fixture
def store(tmp_path: Path) -> TroubledStore:
    return TroubledStore(open_store(str(tmp_path / "bucket")))


@pytest.fixture
def training() -> Training:
    return Training()
