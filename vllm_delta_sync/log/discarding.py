"""Removing what an attempt has put that fails before anything can refer to it.

Does not insist: what stays is found by a collection later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.store import Store


@contextmanager
def discarding(store: Store, keys: Sequence[str]) -> Iterator[None]:
    """Remove the objects of these keys, as they are then, when the inside raises, as far as the store lets us."""
    try:
        yield
    except BaseException:
        with suppress(DeltaSyncError):
            store.delete(keys)
        raise
