"""Both implementations of the native contract, for tests that hold for either."""

from __future__ import annotations

from types import ModuleType

import pytest

from vllm_delta_sync.native import portable


def implementations() -> list[ModuleType]:
    try:
        from vllm_delta_sync.native import cpu
    except ImportError:
        return [portable]
    return [portable, cpu]


@pytest.fixture(params=implementations(), ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def native(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module
