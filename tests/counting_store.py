"""A store that counts what is asked of it.

Holds no assertions.
"""

from __future__ import annotations

from wrapped_store import WrappedStore

from vllm_delta_sync.errors import NotFound
from vllm_delta_sync.store import Content, Store
from vllm_delta_sync.wire.frames import Buffer


class CountingStore(WrappedStore):
    """Keeps the (key, start, end) of every `get`, and counts bytes. Contents by id are what `contents` maps ids to.

    `damage` maps a key to the byte of it that comes wrong.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gets: list[tuple[str, int, int | None]] = []
        self.bytes = 0
        self.contents: dict[str, Buffer] = {}
        self.damage: dict[str, int] = {}

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        self.gets.append((key, start, end))
        if content is None:
            data = bytearray(super().get(key, start, end))
        elif content.id in self.contents:
            data = bytearray(self.contents[content.id][start:end])
        else:
            raise NotFound(f"no content {content.id}")
        if start <= self.damage.get(key, -1) < start + len(data):
            data[self.damage[key] - start] ^= 1
        self.bytes += len(data)
        return bytes(data)
