"""What every object store promises.

Does not cache, retry or verify: callers check sizes and digests, and decide what a failure means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Protocol, runtime_checkable

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.keys import check_key


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What `head` and `put` tell: the size in bytes, and a tag that changes whenever the content does.

    `content` is an id by which `get` finds the bytes without looking the key up; None where the store has none.
    """

    size: int
    tag: str
    content: str | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes named by what they are: the id that a store gave them, and how many there are."""

    id: str
    size: int


class Store(Protocol):
    """A flat namespace of immutable-by-convention objects under keys (`wire.keys`); safe to use from several threads.

    Every method ends within the store's own deadline. It raises Unauthorized, RateLimited or Unavailable when the store
    refuses or fails, MalformedObject for a key that breaks the rule.
    """

    @property
    def uri(self) -> str:
        """Where the store is, for messages; opens it again where its other settings come from the environment."""
        ...

    @property
    def conditional(self) -> bool:
        """Whether `put` keeps what it promises for `create` and `over` also against a rival at the same moment."""
        ...

    @property
    def metered(self) -> bool:
        """Whether each request counts against a quota, so that a reader does well to ask rarely."""
        ...

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        """Write an object whole and durably: a reader sees all of it, or what was there before.

        With `create`, raises AlreadyExists when the key is taken; with `over`, PreconditionFailed when the object's tag
        is another one. What is there stays as it is then. Both are for names that others may write as well: for a name
        with a fresh uuid in it they would only cost, a request where the store has no conditional writes, and the way
        in parts where it has. A condition on more bytes than the store takes in one request raises ConfigError.
        """
        ...

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        """Bytes start … end−1 of an object, fewer where it ends before; raises NotFound.

        With `content`, a store that knows such ids may fetch by it and not ask for the key at all.
        """
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


@runtime_checkable
class Dated(Protocol):
    """A store that also tells when its objects were written."""

    def modified(self, keys: Sequence[str]) -> dict[str, float]:
        """Unix seconds, by the store's clock, at which each object was written whole; keys that it cannot tell it of,
        such as missing ones, are left out."""
        ...


@runtime_checkable
class Filed(Protocol):
    """A store whose objects are files that this machine can open."""

    def opened(self, key: str) -> BufferedReader | None:
        """The file of an object, for reading; None where the objects are no files after all. Raises as `get` does."""
        ...


def checked(key: str, uri: str) -> str:
    """Return the key if it keeps the rule for keys; raises MalformedObject."""
    try:
        return check_key(key)
    except ValueError as error:
        raise MalformedObject(f"{uri}: {error}") from None
