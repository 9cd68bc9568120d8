"""The CUDA library: it compiles without spills, loads without a GPU, and says what is missing when launched there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_delta_sync.native.cuda import CudaError, CudaLibrary
from vllm_delta_sync.native.library import CUDA_FUNCTIONS, load
from vllm_delta_sync.native.types import Seed

SOURCES = Path(__file__).parents[3] / "csrc" / "cuda"
NVCC = shutil.which("nvcc")
ARCHITECTURES = ["80", "90", "100"]
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine: the CUDA library cannot be compiled")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the compiled library, and what ptxas said of it."""
    folder = tmp_path_factory.mktemp("cuda")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    command = [
        str(NVCC), "-O3", "-std=c++17", "--cudart", "static", "--threads", "0", "-Xcompiler", "-fPIC", "-shared",
        "-Xptxas", "-v", *targets,
        *map(str, sorted(SOURCES.glob("*.cu"))), "-o", str(folder / "libvllm_delta_sync_cuda.so"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


@pytest.fixture(scope="module")
def library(built: tuple[Path, str]) -> CudaLibrary:
    return CudaLibrary(load("vllm_delta_sync_cuda", CUDA_FUNCTIONS, [built[0]]))


def has_gpu() -> bool:
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


def test_no_kernel_spills_registers(built: tuple[Path, str]) -> None:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", built[1])
    scatter, hashes, ctx, diff = 4, 2, 3, 2 * 4 + 1  # by width; hash by halves or bytes; diff adds up once
    kernels = scatter + hashes + ctx + diff
    assert len(spills) == kernels * len(ARCHITECTURES)
    assert set(spills) == {("0", "0")}


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU; the launch would succeed")
def test_a_launch_without_a_gpu_raises_the_cuda_error_in_words(library: CudaLibrary) -> None:
    with pytest.raises(CudaError, match=r"scatter kernel was not launched: error \d+, .*(driver|device)"):
        library.scatter(2, 0, 0, 0, 0, 0, 1, 0, 0)
    with pytest.raises(CudaError, match=r"hash kernel was not launched: error \d+, .*(driver|device)"):
        library.state_hash(2, 0, 1, 0, Seed(0, 0), 0, 0)


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU, which answers")
def test_without_a_device_none_is_taken_for_one_whose_blocks_can_wait_for_each_other(library: CudaLibrary) -> None:
    assert library.cooperates(0) is False


def test_an_unknown_width_is_refused(library: CudaLibrary) -> None:
    with pytest.raises(CudaError, match="invalid argument"):
        library.scatter(3, 0, 0, 0, 0, 0, 1, 0, 0)
