"""What every object store promises.

Does not cache, retry or verify: callers check sizes and digests, and decide what a failure means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.keys import check_key


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What `head` tells: the size in bytes, and a tag that changes whenever the content does."""

    size: int
    tag: str


class Store(Protocol):
    """A flat namespace of immutable-by-convention objects under keys (`wire.keys`); safe to use from several threads.

    Every method raises Unauthorized, RateLimited or Unavailable when the store refuses or fails, MalformedObject for
    a key that breaks the rule.
    """

    @property
    def uri(self) -> str:
        """Where the store is, for messages; opens the same store again."""
        ...

    def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        """Write an object whole and durably: a reader sees all of it, or what was there before.

        With `create`, raises AlreadyExists when the key is taken, leaving it as it is.
        """
        ...

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes start … end−1 of an object, fewer where it ends before; raises NotFound."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and tag of an object; raises NotFound."""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """The keys that begin with `prefix`, sorted; none when nothing was ever written."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; a key that does not exist is passed over."""
        ...


def checked(key: str, uri: str) -> str:
    """Return the key if it keeps the rule for keys; raises MalformedObject."""
    try:
        return check_key(key)
    except ValueError as error:
        raise MalformedObject(f"{uri}: {error}") from None
