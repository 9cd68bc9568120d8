"""The CUDA kernels that are made of phases, compiled for the host and run one thread after the other.

Does not time anything, and does not show what only a GPU does: races between threads of a phase, beyond their order.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_delta_sync.native.cuda import CudaLibrary
from vllm_delta_sync.native.library import PHASED_FUNCTIONS, load

SOURCE = Path(__file__).with_name("on_host.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine to compile with")


class HostLibrary(CudaLibrary):
    """`CudaLibrary` on addresses of the host; streams mean nothing."""

    @contextmanager
    def backwards(self) -> Iterator[None]:
        """Threads of a phase run from the last to the first."""
        turn = ctypes.CDLL(self.path).vds_run_backwards
        turn(1)
        try:
            yield
        finally:
            turn(0)


def build(folder: Path) -> HostLibrary:
    """Compile it into a folder; needs COMPILER."""
    assert COMPILER is not None
    out = folder / "libvds_on_host.so"
    command = [COMPILER, "-O2", "-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run([*command, str(SOURCE), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return HostLibrary(load("vds_on_host", PHASED_FUNCTIONS, [folder]))
