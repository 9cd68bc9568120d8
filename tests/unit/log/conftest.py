"""Fixtures of a log with folds and an anchor.

Holds no assertions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_log

from tests.unit.log.replicas import build_long


@pytest.fixture(scope="session")
def long_template(tmp_path_factory: pytest.TempPathFactory) -> tiny_log.TinyLog:
    """Built once; never changed."""
    return build_long(tmp_path_factory.mktemp("long"))


@pytest.fixture
def long(long_template: tiny_log.TinyLog, tmp_path: Path) -> tiny_log.TinyLog:
    """A log of six versions with the folds 0→4, 2→4 and 6→3 and an anchor at 4, the test's own."""
    return tiny_log.copy(long_template, tmp_path)
