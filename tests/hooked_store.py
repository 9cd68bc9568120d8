"""A store that lets a test act just before a write, and that may be as a Hub bucket: metered, no conditional writes.

Holds no assertions.
"""

from __future__ import annotations

from collections.abc import Callable

from wrapped_store import WrappedStore

from vllm_delta_sync.store import ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer


class HookedStore(WrappedStore):
    """Passes everything on. `before` (suffix of a key → action) is called, once each, before such a key is put."""

    def __init__(self, inner: Store, *, conditional: bool = True, metered: bool = False) -> None:
        super().__init__(inner)
        self._conditional = conditional
        self._metered = metered
        self.before: dict[str, Callable[[], object]] = {}

    @property
    def conditional(self) -> bool:
        return self._conditional

    @property
    def metered(self) -> bool:
        return self._metered

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        for suffix in [suffix for suffix in self.before if key.endswith(suffix)]:
            self.before.pop(suffix)()
        return super().put(key, data, create=create, over=over if self.conditional else None)
