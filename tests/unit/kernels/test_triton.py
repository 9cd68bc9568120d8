"""The Triton kernels pass the tests of all kernels under Triton's interpreter, which a process has to begin with."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_delta_sync import kernels
from vllm_delta_sync.errors import ConfigError

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
