"""A store seen from a prefix of its keys.

Does not copy or check anything beyond the prefix itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_delta_sync.store.protocol import ObjectInfo, Store, checked
from vllm_delta_sync.wire.frames import Buffer


@dataclass(frozen=True, slots=True)
class _Within:
    parent: Store
    prefix: str  # ends with "/"

    @property
    def uri(self) -> str:
        return f"{self.parent.uri.rstrip('/')}/{self.prefix[:-1]}"

    def _key(self, key: str) -> str:
        return self.prefix + checked(key, self.uri)

    def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        self.parent.put(self._key(key), data, create=create)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.parent.get(self._key(key), start, end)

    def head(self, key: str) -> ObjectInfo:
        return self.parent.head(self._key(key))

    def list(self, prefix: str = "") -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.parent.list(self.prefix + prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self.parent.delete(self._key(key) for key in keys)


def child(store: Store, prefix: str) -> Store:
    """The store of the keys below `prefix`/; raises MalformedObject when the prefix breaks the rule for keys."""
    checked(prefix, store.uri)
    if isinstance(store, _Within):
        return _Within(store.parent, f"{store.prefix}{prefix}/")
    return _Within(store, prefix + "/")
