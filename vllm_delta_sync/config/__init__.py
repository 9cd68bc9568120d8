"""What an operator can set: a server's settings and the stores, as frozen models, and where they are read from.

Does not open a store, import torch or vLLM, or know what vLLM itself is set to.
"""

from __future__ import annotations

from vllm_delta_sync.config.loading import CONFIG_ENV, SECTION, load, load_file, parse, store_from_uri
from vllm_delta_sync.config.server import DeltaSyncConfig
from vllm_delta_sync.config.stores import (
    AzStoreConfig,
    FileStoreConfig,
    GsStoreConfig,
    HfStoreConfig,
    MemoryStoreConfig,
    S3StoreConfig,
    SharedStoreConfig,
    StoreConfig,
    file_path,
)

__all__ = [
    "CONFIG_ENV",
    "SECTION",
    "AzStoreConfig",
    "DeltaSyncConfig",
    "FileStoreConfig",
    "GsStoreConfig",
    "HfStoreConfig",
    "MemoryStoreConfig",
    "S3StoreConfig",
    "SharedStoreConfig",
    "StoreConfig",
    "file_path",
    "load",
    "load_file",
    "parse",
    "store_from_uri",
]
