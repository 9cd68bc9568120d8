"""What every test shares: bounded threads, hypothesis settings, the model cache, a tiny log on disk.

Holds no assertions, and no fixture that only one part needs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch or numpy start their pools; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a test breaks stays broken, so there is nothing to wait for between two tries of the Hub's client.
os.environ.setdefault("HF_XET_CLIENT_RETRY_BASE_DELAY", "50ms")

import tiny_log

settings.register_profile("repository", deadline=None, max_examples=50, print_blob=True)
settings.load_profile("repository")


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The git-ignored folder in which models are built once and kept, `.cache/` at the root of the repository."""
    path = Path(__file__).parents[1] / ".cache"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> tiny_log.TinyLog:
    """Built once, because every write is synced to the disk; never changed."""
    return tiny_log.build(tmp_path_factory.mktemp("template"))


@pytest.fixture
def tiny(template: tiny_log.TinyLog, tmp_path: Path) -> tiny_log.TinyLog:
    """A log of three versions after its base, the test's own."""
    return tiny_log.copy(template, tmp_path)
