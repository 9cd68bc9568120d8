"""Fixtures of a tiny log on disk.

Holds no assertions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(next(parent for parent in Path(__file__).parents if parent.name == "tests")))

import tiny_log


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> tiny_log.TinyLog:
    """Built once, because every write is synced to the disk; never changed."""
    return tiny_log.build(tmp_path_factory.mktemp("template"))


@pytest.fixture
def tiny(template: tiny_log.TinyLog, tmp_path: Path) -> tiny_log.TinyLog:
    """A log of three versions after its base, the test's own."""
    return tiny_log.copy(template, tmp_path)
