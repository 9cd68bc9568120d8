"""Fetching objects of hostile size and content: bounded, then verified against the reference that led to them.

Does not parse them.
"""

from __future__ import annotations

import hashlib

from vllm_delta_sync.errors import DigestMismatch, MalformedObject, NotFound
from vllm_delta_sync.store import Content, Store
from vllm_delta_sync.wire.manifest import Found


def bounded(store: Store, key: str, limit: int, content: Content | None = None) -> bytes:
    """A whole object of at most `limit` bytes; raises MalformedObject when there are more, NotFound when none."""
    data = store.get(key, 0, limit + 1, content=content)
    if len(data) > limit:
        raise MalformedObject(f"{store.uri}/{key}: larger than the {limit} bytes such an object may have")
    return data


def verified(store: Store, ref: Found) -> bytes:
    """The object of a reference; raises NotFound, or DigestMismatch when its size or SHA-256 is another one."""
    if ref.content is not None:
        try:
            return _checked(store, ref, store.get(ref.key, 0, ref.size + 1, content=Content(ref.content, ref.size)))
        except (NotFound, DigestMismatch):
            pass  # the id is only a hint: one that leads nowhere, or elsewhere, must not hide the object
    return _checked(store, ref, store.get(ref.key, 0, ref.size + 1))


def verified_range(store: Store, ref: Found, start: int, size: int, sha256: str) -> bytes:
    """`size` bytes of an object from `start` on, verified by their own SHA-256; raises as `verified` does."""
    what = f"{store.uri}/{ref.key}, bytes {start} to {start + size}"
    if ref.content is not None:
        try:
            data = store.get(ref.key, start, start + size, content=Content(ref.content, ref.size))
            return _same(data, size, sha256, what)
        except (NotFound, DigestMismatch):
            pass  # as above
    return _same(store.get(ref.key, start, start + size), size, sha256, what)


def _checked(store: Store, ref: Found, data: bytes) -> bytes:
    return _same(data, ref.size, ref.sha256, f"{store.uri}/{ref.key}")


def _same(data: bytes, size: int, sha256: str, what: str) -> bytes:
    if len(data) != size:
        stored = f"{len(data)} bytes" if len(data) < size else "more bytes"
        raise DigestMismatch(f"{what}: {stored} where {size} are stated; truncated or replaced")
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DigestMismatch(f"{what}: SHA-256 {found} where {sha256} is stated; damaged or replaced since")
    return data
