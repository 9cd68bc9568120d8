"""Finds and loads the C libraries of csrc/ and declares their functions to ctypes.

Does not compute, and does not raise when a library is absent: callers get the reason and decide.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import CDLL, c_char_p, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import vllm_delta_sync

ABI_VERSION = 4  # kAbiVersion of csrc/vds_core.h

# Addresses of numpy arrays go as plain numbers: a typed pointer costs ten times as much to make.
_U8 = _U16 = _U32 = _I64 = c_void_p

CPU_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "vds_instruction_set": (c_char_p, []),
    "vds_diff": (c_int, [c_void_p]),
    "vds_hash_run": (c_int, [c_int, c_void_p, c_int64, c_int64, c_uint64, c_uint64, _U32]),
    "vds_hash_strided": (c_int, [c_int, c_void_p, c_int, _I64, _I64, c_int64, _I64, c_uint64, c_uint64, _U32]),
    "vds_hash_changes": (c_int, [c_int, _U32, c_int64, c_void_p, c_void_p, c_int64, c_uint64, c_uint64, _U32]),
    "vds_gaps_size": (c_int64, [_U32, c_int64]),
    "vds_encode_gaps": (None, [_U32, c_int64, _U8]),
    "vds_decode_gaps": (c_int, [_U8, c_int64, c_int64, c_int64, _U32]),
    "vds_steps_size": (c_int64, [_U16, _U16, c_int64]),
    "vds_encode_steps": (None, [_U16, _U16, c_int64, _U8]),
    "vds_decode_steps": (c_int, [_U8, c_int64, c_int64, _U16]),
    "vds_apply_steps": (None, [_U16, _U16, c_int64, _U16]),
    "vds_merge": (c_int64, [c_int, _U32, c_void_p, c_int64, _U32, c_void_p, c_int64, c_int, _U32, c_void_p]),
    "vds_map_positions": (c_int64, [_U32, c_int64, c_int64, c_int, _I64, _I64, _I64, _U32, _I64]),
    "vds_ctx_model_size": (c_int64, [c_int]),
    "vds_ctx_model": (c_int, [c_int, _U8, _U16, _U16, c_void_p]),
    "vds_ctx_memory": (c_int64, [c_void_p]),
    "vds_ctx_encode": (c_int64, [c_void_p]),
    "vds_ctx_read_index": (c_int, [_U8, c_int64, _I64, c_int64, c_int64]),
    "vds_ctx_decode": (c_int64, [c_void_p]),
    "vds_ctx_tally": (c_int64, [c_void_p]),
    "vds_ctx_survey": (c_int, [c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64, _I64, _I64]),
    "vds_gather": (c_int, [c_int, c_void_p, _U32, c_int64, c_void_p]),
    "vds_scatter": (c_int64, [c_int, c_void_p, c_int64, _U32, c_void_p, c_void_p, c_int64, c_int]),
    "vds_read_sum": (c_uint64, [c_void_p, c_int64]),
}

# Those of the CUDA library that a host can run, too, as its tests do.
PHASED_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "vds_cuda_error": (c_char_p, [c_int]),
    "vds_cuda_scatter": (
        c_int,
        [c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    ),
    "vds_cuda_ctx_decode": (
        c_int,
        [c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "vds_cuda_diff_mark": (c_int, [c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "vds_cuda_diff_write": (
        c_int,
        [c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
}

CUDA_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "vds_cuda_cooperates": (c_int, [c_int, c_void_p]),
    "vds_cuda_hash": (c_int, [c_int, c_void_p, c_int64, c_int64, c_uint64, c_uint64, c_void_p, c_void_p]),
    **PHASED_FUNCTIONS,
}


class Loaded(NamedTuple):
    """A library, or why there is none."""

    library: CDLL | None
    reason: str


def load(stem: str, functions: dict[str, tuple[Any, list[Any]]], folders: list[Path] | None = None) -> Loaded:
    """Load `lib<stem>.so` from the first of `folders` that has it, if its ABI is the one this package was written for.

    By default looks in every folder that makes up `vllm_delta_sync.native`: the package's own and, for an editable
    install, the one in site-packages that the build wrote to.
    """
    name = f"lib{stem}{'.dylib' if sys.platform == 'darwin' else '.so'}"
    looked = _folders() if folders is None else folders
    found = next((folder / name for folder in looked if (folder / name).is_file()), None)
    if found is None:
        return Loaded(None, f"{name} is not in {', '.join(map(str, looked))}; installing the package builds it")
    try:
        library = ctypes.CDLL(str(found))
        library.vds_abi_version.restype = c_int
        version = int(library.vds_abi_version())
        if version != ABI_VERSION:
            return Loaded(None, f"{found} has ABI {version}, this package needs {ABI_VERSION}; reinstall the package")
        for function, (result, arguments) in functions.items():
            symbol: Callable[..., Any] = getattr(library, function)
            symbol.restype, symbol.argtypes = result, arguments  # type: ignore[attr-defined]
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{found} does not load: {error}; reinstall the package")
    return Loaded(library, str(found))


def _folders() -> list[Path]:
    own = Path(__file__).parent
    packages = [Path(entry) / "native" for entry in vllm_delta_sync.__path__]
    installed = [Path(entry) / "vllm_delta_sync" / "native" for entry in sys.path if entry.endswith("-packages")]
    return list(dict.fromkeys([own, *packages, *installed]))
