"""Fixtures of a tiny log on disk.

Holds no assertions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(next(parent for parent in Path(__file__).parents if parent.name == "tests")))

import tiny_log


@pytest.fixture
def tiny(tmp_path: Path) -> tiny_log.TinyLog:
    """A log of three versions after its base."""
    return tiny_log.build(tmp_path)
