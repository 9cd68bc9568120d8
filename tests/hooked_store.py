"""A store that lets a test act just before a write, and that may be as a Hub bucket: metered, no conditional writes.

Holds no assertions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm_delta_sync.store import Content, ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer


class HookedStore:
    """Passes everything on. `before` (suffix of a key → action) is called, once each, before such a key is put."""

    def __init__(self, inner: Store, *, conditional: bool = True, metered: bool = False) -> None:
        self.inner = inner
        self.conditional = conditional
        self.metered = metered
        self.before: dict[str, Callable[[], object]] = {}

    @property
    def uri(self) -> str:
        return self.inner.uri

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        for suffix in [suffix for suffix in self.before if key.endswith(suffix)]:
            self.before.pop(suffix)()
        return self.inner.put(key, data, create=create, over=over if self.conditional else None)

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        return self.inner.get(key, start, end, content=content)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)
