"""obstore's clients, made from settings; what those leave open, obstore reads from the environment.

Does not hold or read a credential itself.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from vllm_delta_sync.config import AzStoreConfig, GsStoreConfig, MemoryStoreConfig, S3StoreConfig
from vllm_delta_sync.store.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, allowance

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config

ObjectConfig = S3StoreConfig | GsStoreConfig | AzStoreConfig | MemoryStoreConfig

LARGEST_REQUEST = 1 << 30
"""Bytes that one request moves at most: a shard that is read, or a part of what is written."""

_RETRIES = 5
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")

_memories: dict[str, MemoryStore] = {}
_memories_lock = threading.Lock()


def client(config: ObjectConfig, timeout_s: float) -> ObjectStore:
    """The client of the whole bucket, container or memory; the prefix is left to the caller.

    Raises an exception of obstore when the settings and the environment together do not make a client.
    """
    if isinstance(config, MemoryStoreConfig):
        with _memories_lock:
            return _memories.setdefault(config.name, MemoryStore())
    if isinstance(config, S3StoreConfig):
        return S3Store(
            config.bucket,
            config=_s3(config),
            client_options=_http(config.endpoint_url, timeout_s),
            retry_config=_retries(timeout_s),
        )
    if isinstance(config, GsStoreConfig):
        google: GCSConfig = {"skip_signature": True} if config.anonymous else {}
        return GCSStore(
            config.bucket, config=google, client_options=_http(None, timeout_s), retry_config=_retries(timeout_s)
        )
    return AzureStore(
        config.container,
        config=_azure(config),
        client_options=_http(config.endpoint_url, timeout_s),
        retry_config=_retries(timeout_s),
    )


def _s3(config: S3StoreConfig) -> S3Config:
    options: S3Config = {}
    if config.endpoint_url is not None:
        options["endpoint"] = config.endpoint_url
    if config.region is not None:
        options["region"] = config.region
    if config.anonymous:
        options["skip_signature"] = True
    return options


def _azure(config: AzStoreConfig) -> AzureConfig:
    options: AzureConfig = {}
    if config.account is not None:
        options["account_name"] = config.account
    if config.endpoint_url is not None:
        options["endpoint"] = config.endpoint_url
    if config.anonymous:
        options["skip_signature"] = True
    return options


def _http(endpoint: str | None, timeout_s: float) -> ClientConfig:
    """Limits that end every request of the client, also one whose caller has given up on it."""
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=min(5.0, timeout_s / 3)),
        # Of silence, so that one stalled answer can be asked for again.
        "read_timeout": timedelta(seconds=timeout_s / 3),
        "timeout": timedelta(seconds=allowance(timeout_s, LARGEST_REQUEST)),
    }
    # Whoever writes http:// means it: naming the server is the decision, and obstore would ask for it a second time.
    if any(url.startswith("http://") for url in (endpoint, *map(os.environ.get, _ENDPOINTS)) if url):
        options["allow_http"] = True
    return options


def _retries(timeout_s: float) -> RetryConfig:
    return {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s / 2),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=min(LONGEST_PAUSE_S, timeout_s / 3)),
            "base": 2,
        },
    }
