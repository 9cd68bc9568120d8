"""A follower whose clock stands still.

Holds no assertions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.serving.watched import Watched


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    """On a bucket in which nothing is published yet."""
    return Watched(tmp_path / "bucket")
