"""The memory that the ctx codec's loops are given by address: it is held as long as they may look at it."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_delta_sync.native import CtxGrid, ctx_types
from vllm_delta_sync.native.types import address_of


def test_threads_that_share_a_grid_share_what_the_library_reads_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, another_threads = CtxGrid(4, 8, np.array([(0, 8)], np.int64)), []

    def interrupted(values: np.ndarray) -> int:
        monkeypatch.setattr(ctx_types, "address_of", address_of)
        another_threads.append(grid.address)  # it comes first, while this one is about to describe the grid
        return address_of(values)

    monkeypatch.setattr(ctx_types, "address_of", interrupted)
    assert grid.address == another_threads[0], "one of the two addresses is of memory that nobody holds"


def test_memory_that_could_not_grow_is_none_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx_cpu = pytest.importorskip("vllm_delta_sync.native.ctx_cpu")
    worker = ctx_cpu._Worker()
    job = worker.job
    grid = CtxGrid(1, 1 << 18, np.array([(0, 1 << 18)], np.int64))
    job.grid = grid.address

    def call(_: int) -> int:
        return 0 if job.size >= least else ctx_cpu._NO_MEMORY

    def interrupted(values: np.ndarray) -> int:
        raise KeyboardInterrupt

    least = 1
    assert worker.run(call) == 0
    job.n, least = 1 << 18, job.size + 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ctx_cpu, "address_of", interrupted)
        worker.run(call)
    assert job.size == 0
    assert worker.run(call) == 0
    assert (job.memory, job.size) == (worker._bytes.ctypes.data, worker._bytes.size)
