"""The Triton kernels pass the tests of all kernels under Triton's interpreter, which a process has to begin with."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_sync import kernels
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels import triton

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is optional, and not installed here"
)


@needs_triton
def test_every_test_of_the_kernels_passes_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton and not threads"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("test_kernels.py"))],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 10, done.stdout


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="under the interpreter Triton serves the CPU")
def test_triton_is_refused_on_a_cpu_by_name() -> None:
    with pytest.raises(ConfigError, match="kernel: triton was asked for on cpu, but triton compiles for GPUs only"):
        kernels.select("triton", torch.device("cpu"))


class Filled(TorchDispatchMode):
    """A device whose memory is gone with the launch of a kernel that writes live weights."""

    written = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object) -> None:
            self.written = True

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.written:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


@needs_triton
def test_nothing_that_could_fail_follows_what_was_written_or_it_would_not_be_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_delta_sync.kernels import triton_kernels

    live, row = torch.zeros(3, dtype=torch.int16), torch.zeros(1, dtype=torch.int16)
    patch = kernels.Prepared((live,), torch.tensor([[live.data_ptr(), 0, 1]]), torch.zeros(1).int(), row, row)
    filled = Filled()
    monkeypatch.setattr(triton_kernels, "compare", {(1,): lambda *arguments: None})
    monkeypatch.setattr(triton_kernels, "write", filled)
    with filled:
        outcome = triton.write(patch)
    assert filled.written and int(outcome) == -1
