"""A store seen from a prefix of its keys.

Does not copy or check anything beyond the prefix itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader

from vllm_delta_sync.store.batch import Batch, together
from vllm_delta_sync.store.protocol import Content, Dated, Filed, ObjectInfo, Store, checked
from vllm_delta_sync.store.watch import Watchable
from vllm_delta_sync.wire.frames import Buffer


@dataclass(frozen=True, slots=True)
class _Within:
    parent: Store
    prefix: str  # ends with "/"

    @property
    def uri(self) -> str:
        return f"{self.parent.uri.rstrip('/')}/{self.prefix[:-1]}"

    @property
    def conditional(self) -> bool:
        return self.parent.conditional

    @property
    def metered(self) -> bool:
        return self.parent.metered

    def full(self, key: str) -> str:
        """The parent's name of a key."""
        return self.prefix + checked(key, self.uri)

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        return self.parent.put(self.full(key), data, create=create, over=over)

    @contextmanager
    def batch(self) -> Iterator[Batch]:
        with together(self.parent) as batch:
            yield _BatchWithin(batch, self)

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        return self.parent.get(self.full(key), start, end, content=content)

    def head(self, key: str) -> ObjectInfo:
        return self.parent.head(self.full(key))

    def list(self, prefix: str = "") -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.parent.list(self.prefix + prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self.parent.delete(self.full(key) for key in keys)

    def modified(self, keys: Sequence[str]) -> dict[str, float]:
        if not isinstance(self.parent, Dated):
            return {}
        found = self.parent.modified([self.full(key) for key in keys])
        return {key.removeprefix(self.prefix): at for key, at in found.items()}

    def opened(self, key: str) -> BufferedReader | None:
        return self.parent.opened(self.full(key)) if isinstance(self.parent, Filed) else None

    def changes(self, key: str, stop: threading.Event) -> Iterator[None]:
        """As `watch.Watchable` promises; ends at once when the parent has no feed."""
        return self.parent.changes(self.full(key), stop) if isinstance(self.parent, Watchable) else iter(())


@dataclass(frozen=True, slots=True)
class _BatchWithin:
    inner: Batch
    place: _Within

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        return self.inner.put(self.place.full(key), data)


def child(store: Store, prefix: str) -> Store:
    """The store of the keys below `prefix`/; raises MalformedObject when the prefix breaks the rule for keys."""
    checked(prefix, store.uri)
    if isinstance(store, _Within):
        return _Within(store.parent, f"{store.prefix}{prefix}/")
    return _Within(store, prefix + "/")
