"""Keep running vLLM servers in step with a trainer by sending only the weights that changed.

Importing this package pulls in neither torch nor vLLM; the public names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_delta_sync.log import DeltaLog
    from vllm_delta_sync.serving.extension import WorkerExtension
    from vllm_delta_sync.trainer import Publication, Publisher

__all__ = ["DeltaLog", "Publication", "Publisher", "WorkerExtension"]

_HOMES = {
    "DeltaLog": "vllm_delta_sync.log",
    "Publication": "vllm_delta_sync.trainer",
    "Publisher": "vllm_delta_sync.trainer",
    "WorkerExtension": "vllm_delta_sync.serving.extension",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
