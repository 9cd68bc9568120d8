"""Fetching objects of hostile size and content: bounded, then verified against the reference that led to them.

Does not parse them.
"""

from __future__ import annotations

import hashlib

from vllm_delta_sync.errors import DigestMismatch, MalformedObject
from vllm_delta_sync.store import Store
from vllm_delta_sync.wire.manifest import ObjectRef


def bounded(store: Store, key: str, limit: int) -> bytes:
    """A whole object of at most `limit` bytes; raises MalformedObject when there are more, NotFound when none."""
    data = store.get(key, 0, limit + 1)
    if len(data) > limit:
        raise MalformedObject(f"{store.uri}/{key}: larger than the {limit} bytes such an object may have")
    return data


def verified(store: Store, ref: ObjectRef, size: int) -> bytes:
    """The object of a reference that states its size; raises DigestMismatch when size or SHA-256 differ."""
    data = store.get(ref.key, 0, size + 1)
    if len(data) != size:
        stored = f"{len(data)} bytes" if len(data) < size else "more bytes"
        raise DigestMismatch(f"{store.uri}/{ref.key}: {stored} where its manifest states {size}; truncated or replaced")
    check_sha256(store, ref, data)
    return data


def check_sha256(store: Store, ref: ObjectRef, data: bytes) -> None:
    """Raise DigestMismatch unless `data` has the SHA-256 of the reference."""
    found = hashlib.sha256(data).hexdigest()
    if found != ref.sha256:
        raise DigestMismatch(
            f"{store.uri}/{ref.key}: SHA-256 {found} where {ref.sha256} is stated; damaged or replaced since"
        )
