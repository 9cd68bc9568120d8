"""Writing several objects of fresh names at once: in one request where a store has one for many, else one by one.

Does not order them: nothing may refer to any of them before all are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from vllm_delta_sync.store.protocol import ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer


class Batch(Protocol):
    """Objects that are written together. For use from one thread."""

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        """Write an object under a name that nothing has; it is there, and durable, at the latest when the batch ends.

        Size and `content` are known at once, so that what is put next may state them.
        """
        ...


@runtime_checkable
class Batching(Protocol):
    """A store that names several objects in one request."""

    def batch(self) -> AbstractContextManager[Batch]:
        """A batch, which ends with the context: all of it is durable then, or the context raises as `put` does.

        Some of it may be there after a failure. When the inside raises, no name is given to anything.
        """
        ...


@contextmanager
def together(store: Store) -> Iterator[Batch]:
    """A batch on any store; see `Batching.batch`."""
    if isinstance(store, Batching):
        with store.batch() as batch:
            yield batch
    else:
        yield store
