"""A store in front of another one that passes everything on: what the stores that tests interfere with begin with.

Holds no assertions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_delta_sync.store import Content, ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer


class WrappedStore:
    """Passes everything on to `inner`, but for what a subclass does instead."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def conditional(self) -> bool:
        return self.inner.conditional

    @property
    def metered(self) -> bool:
        return self.inner.metered

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        return self.inner.put(key, data, create=create, over=over)

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        return self.inner.get(key, start, end, content=content)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)
