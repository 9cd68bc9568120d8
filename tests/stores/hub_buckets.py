"""Stores on unused buckets of the stand-in Hub, of clients that wait long or not.

Holds no assertions.
"""

from __future__ import annotations

import os

from vllm_delta_sync.config import HfStoreConfig
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.store.hf import HfStore
from vllm_delta_sync.store.protocol import Content

DATA = os.urandom(70_000)  # no compressible byte: a wrong one comes through where nobody verifies

QUICK_S, PATIENT_S = 2.0, 20.0
# Three attempts of half a minute, by which hf_xet itself ends a stream that hangs, and the waits between.
HUNG_S = 150.0

_numbers = iter(range(1_000_000))


def unused() -> HfStoreConfig:
    """The settings of a bucket that nobody has used."""
    return HfStoreConfig(bucket=f"tests/unused-{next(_numbers)}")


def bucket(timeout_s: float = PATIENT_S) -> HfStore:
    """A store on a bucket of its own."""
    store = open_store(unused(), timeout_s=timeout_s)
    assert isinstance(store, HfStore)
    return store


def hurried(store: Store) -> Store:
    """The same bucket by someone who waits for two seconds only."""
    return open_store(store.uri, timeout_s=QUICK_S)


def content_of(store: Store, key: str) -> Content:
    info = store.head(key)
    assert info.content is not None
    return Content(info.content, info.size)
