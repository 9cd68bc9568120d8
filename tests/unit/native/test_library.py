"""Finding and loading the C libraries, and what happens without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.kernels.on_host import COMPILER, needs_compiler
from vllm_delta_sync import native
from vllm_delta_sync.native import portable, portable_ctx
from vllm_delta_sync.native.library import ABI_VERSION, CPU_FUNCTIONS, load


def compile_library(folder: Path, source: str) -> Path:
    path = folder / "libsample.so"
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-xc++", "-", "-o", str(path)], input=source.encode(), check=True
    )
    return path


def test_a_missing_library_is_no_error_and_says_where_it_was_sought(tmp_path: Path) -> None:
    loaded = load("sample", CPU_FUNCTIONS, [tmp_path])
    assert loaded.library is None
    assert str(tmp_path) in loaded.reason and "libsample.so" in loaded.reason


def test_a_file_that_is_not_a_library_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "libsample.so").write_bytes(b"not an ELF file")
    loaded = load("sample", CPU_FUNCTIONS, [tmp_path])
    assert loaded.library is None and "does not load" in loaded.reason


@needs_compiler
def test_a_library_of_another_abi_is_not_used(tmp_path: Path) -> None:
    compile_library(tmp_path, 'extern "C" int vds_abi_version() { return 700; }')
    loaded = load("sample", CPU_FUNCTIONS, [tmp_path])
    assert loaded.library is None and "has ABI 700" in loaded.reason


@needs_compiler
def test_a_library_that_lacks_a_function_is_not_used(tmp_path: Path) -> None:
    compile_library(tmp_path, f'extern "C" int vds_abi_version() {{ return {ABI_VERSION}; }}')
    loaded = load("sample", CPU_FUNCTIONS, [tmp_path])
    assert loaded.library is None and "vds_instruction_set" in loaded.reason


def test_the_backend_names_itself_and_its_reason() -> None:
    assert native.backend().split(" ")[0] in ("native", "portable")
    assert native.backend_reason()


def test_both_implementations_offer_the_whole_contract() -> None:
    types = {"Changes", "CtxGrid", "CtxModel", "Seed", "Tally"}
    names = set(native.__all__) - types - {"backend", "backend_reason"}
    assert names == set(portable.__all__) | set(portable_ctx.__all__)
    assert all(callable(getattr(native, name)) for name in names)


def test_without_the_library_the_same_calls_run_in_numpy() -> None:
    # In a fresh interpreter whose finder hides the module that loads the library.
    script = (
        "import sys\n"
        "sys.modules['vllm_delta_sync.native.cpu'] = None\n"
        "from vllm_delta_sync import native\n"
        "import numpy as np\n"
        "assert native.backend() == 'portable (numpy)', native.backend()\n"
        "assert native.backend_reason()\n"
        "assert native.encode_gaps(np.array([4], np.uint32)).tolist() == [4]\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
