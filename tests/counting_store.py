"""A store that counts what is asked of it.

Holds no assertions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vllm_delta_sync.errors import NotFound
from vllm_delta_sync.store import Content, ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer


@dataclass
class CountingStore:
    """Another store, and the (key, start, end) of every `get`. Contents by id are what `contents` maps ids to."""

    store: Store
    gets: list[tuple[str, int, int | None]] = field(default_factory=list)
    bytes: int = 0
    contents: dict[str, Buffer] = field(default_factory=dict)
    damage: dict[str, int] = field(default_factory=dict)  # key: the byte that comes wrong

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def conditional(self) -> bool:
        return self.store.conditional

    @property
    def metered(self) -> bool:
        return self.store.metered

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        return self.store.put(key, data, create=create, over=over)

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        self.gets.append((key, start, end))
        if content is None:
            data = bytearray(self.store.get(key, start, end))
        elif content.id in self.contents:
            data = bytearray(self.contents[content.id][start:end])
        else:
            raise NotFound(f"no content {content.id}")
        if start <= self.damage.get(key, -1) < start + len(data):
            data[self.damage[key] - start] ^= 1
        self.bytes += len(data)
        return bytes(data)

    def head(self, key: str) -> ObjectInfo:
        return self.store.head(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return self.store.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self.store.delete(keys)
