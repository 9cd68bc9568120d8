"""Opening a store by its settings or its URI.

Does not import a store's client before one of its kind is opened, nor read a credential.
"""

from __future__ import annotations

from pathlib import Path

from vllm_delta_sync.config import FileStoreConfig, HfStoreConfig, StoreConfig, store_from_uri
from vllm_delta_sync.store.protocol import Store

TIMEOUT_S = 60.0
"""Seconds that a call may take when nobody says; see `patience.allowance`."""


def open_store(where: str | StoreConfig, *, timeout_s: float = TIMEOUT_S) -> Store:
    """The store of some settings, at a URI, or at a path of this machine; nothing is created before the first write.

    Args:
        where: `file:///…`, `hf://buckets/…`, `s3://…`, `gs://…`, `az://…`, `memory://…`, a path, or a `config` model.
        timeout_s: seconds that one call over a network may take, besides one second for each MiB that it moves.

    Raises:
        ConfigError: the scheme is unknown, the store cannot mean the URI, or the package that speaks to it is missing.
    """
    config = store_from_uri(where) if isinstance(where, str) else where
    if isinstance(config, FileStoreConfig):
        from vllm_delta_sync.store.local import LocalStore

        return LocalStore(Path(config.path))
    if isinstance(config, HfStoreConfig):
        from vllm_delta_sync.store import hf

        return hf.open_configured(config, timeout_s)
    from vllm_delta_sync.store import objects

    return objects.open_configured(config, timeout_s)
