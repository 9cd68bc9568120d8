"""Imports point one way, and light modules stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _loaded_heavy_modules(statement: str) -> str:
    code = f"{statement}\nimport sys\nprint(*sorted({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["", ".errors", ".config", ".native", ".wire", ".store", ".log", ".cli"])
def test_importing_a_light_module_loads_neither_torch_nor_vllm(module: str) -> None:
    assert _loaded_heavy_modules(f"import vllm_delta_sync{module}") == ""


def test_the_probe_would_see_torch() -> None:
    assert _loaded_heavy_modules("import torch") == "torch"


def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
