"""`create` and `over` on a store without conditional writes: look first, then write.

Does not exclude a rival between look and write: such a store says `conditional = False`, and its users look again.
"""

from __future__ import annotations

from vllm_delta_sync.errors import AlreadyExists, NotFound, PreconditionFailed
from vllm_delta_sync.store.protocol import Store


def check(store: Store, key: str, *, create: bool, over: str | None) -> None:
    """Raise AlreadyExists or PreconditionFailed, as `put` must, by what the key holds now."""
    if not create and over is None:
        return
    try:
        found = store.head(key).tag
    except NotFound:
        found = None
    if create and found is not None:
        raise AlreadyExists(f"{store.uri}/{key} already exists")
    if over is not None and found != over:
        raise replaced(store.uri, key, over)


def replaced(uri: str, key: str, over: str) -> PreconditionFailed:
    """What `put(over=…)` raises on every store when the object's tag is another one."""
    return PreconditionFailed(
        f"{uri}/{key} is not the object with tag {over!r} any more; read it again before writing it"
    )
