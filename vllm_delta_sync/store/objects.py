"""S3, Google Cloud Storage, Azure Blob Storage, and memory of this process, as stores, through obstore.

Does not cache, and does not create buckets. A `put` that fails without an answer may have happened.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from vllm_delta_sync.config import AzStoreConfig, GsStoreConfig, MemoryStoreConfig, S3StoreConfig
from vllm_delta_sync.errors import ConfigError, StoreError
from vllm_delta_sync.store import unconditional
from vllm_delta_sync.store.deadline import call_within
from vllm_delta_sync.store.patience import ListingLimit, allowance
from vllm_delta_sync.store.protocol import Content, ObjectInfo, Store, checked
from vllm_delta_sync.store.within import child
from vllm_delta_sync.wire.frames import Buffer

try:
    import obstore
    from obstore import exceptions

    from vllm_delta_sync.store.object_clients import LARGEST_REQUEST, client
    from vllm_delta_sync.store.object_errors import PastEnd, typed
except ModuleNotFoundError as error:
    raise ConfigError(
        f"object stores need the package {error.name}: pip install 'vllm-delta-sync[object-store]'"
    ) from error

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult
    from obstore.store import ObjectStore as Client

WHOLE = 64 << 20
"""Bytes of an object that goes up in one request; what is larger goes in parts, a few of them in memory at a time."""

_PIECE = 8 << 20  # bytes of a part of an upload, and of a piece of a download
_MOST_PARTS = 10_000  # that the stores take
_PAGE = 1000  # keys per listing request
_BATCH = 256  # keys per deletion, the least that the stores take in one request

_T = TypeVar("_T")

_user: int | None = None  # the process in which obstore was used first, and has its threads


def open_configured(
    config: S3StoreConfig | GsStoreConfig | AzStoreConfig | MemoryStoreConfig, timeout_s: float
) -> Store:
    """The store of such settings, at their prefix. Raises ConfigError when they and the environment are not enough."""
    try:
        opened = client(config, timeout_s)
    except (exceptions.BaseError, ValueError) as error:
        brief = str(error).split("\n\nDebug source", 1)[0]
        raise ConfigError(f"cannot open the store {config.uri!r}: {brief}; see docs/operations.md") from None
    root = config.model_copy(update={"prefix": None}).uri
    conditional = config.conditional_writes if isinstance(config, S3StoreConfig) else True
    store = ObjectStore(root, opened, timeout_s, conditional=conditional, by_version=isinstance(config, GsStoreConfig))
    return child(store, config.prefix) if config.prefix else store


class ObjectStore:
    """A whole bucket or container behind obstore.

    Args:
        uri: where it is, for messages.
        client: obstore's own store object.
        timeout_s: seconds that one call may take, besides one for each MiB that it moves.
        conditional: whether the server honours conditions on writes.
        by_version: whether the server's conditions are on an object's generation (Google) and not on its ETag.
    """

    metered = False

    def __init__(self, uri: str, client: Client, timeout_s: float, *, conditional: bool, by_version: bool) -> None:
        self.uri = uri
        self.conditional = conditional
        self._client = client
        self._timeout_s = timeout_s
        self._by_version = by_version

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        where, view = self._where(key), memoryview(data).cast("B")
        mode: PutMode = "overwrite"
        if not self.conditional:
            unconditional.check(self, key, create=create, over=over)
        elif create:
            mode = "create"
        elif over is not None:
            mode = {"version": over} if self._by_version else {"e_tag": over}
        if mode != "overwrite" and view.nbytes > LARGEST_REQUEST:
            raise ConfigError(
                f"{where}: {view.nbytes} bytes; at most {LARGEST_REQUEST} can be written under a condition, as what "
                "goes up in parts can have none"
            )
        in_parts = mode == "overwrite" and view.nbytes > WHOLE
        part = max(_PIECE, -(-view.nbytes // _MOST_PARTS))
        result = self._call(
            where,
            view.nbytes,
            lambda: obstore.put(self._client, key, view, mode=mode, use_multipart=in_parts, chunk_size=part),
        )
        if in_parts and (result["version"] if self._by_version else result["e_tag"]) is None:
            return self.head(key)  # not every server tells at the end of an upload in parts
        return ObjectInfo(view.nbytes, self._tag(result, where))

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        del content  # these know their objects by key alone
        where = self._where(key)
        end = self.head(key).size if end is None else end
        if end <= start:
            self.head(key)
            return b""
        try:
            return self._call(where, end - start, lambda: self._read(key, start, end))
        except PastEnd:
            if self.head(key).size > start:  # it grew in between, or the server is wrong about it
                raise
            return b""

    def head(self, key: str) -> ObjectInfo:
        where = self._where(key)
        meta = self._call(where, 0, lambda: obstore.head(self._client, key))
        return ObjectInfo(meta["size"], self._tag(meta, where))

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted(meta["path"] for meta in self._listed(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = iter([checked(key, self.uri) for key in keys])
        while batch := list(itertools.islice(wanted, _BATCH)):
            self._call(f"{self.uri}/{batch[0]}", 0, partial(self._delete, batch))

    def modified(self, keys: Sequence[str]) -> dict[str, float]:
        """Unix seconds, by the store's clock, at which objects were written; a key that does not exist is left out."""
        wanted = {checked(key, self.uri) for key in keys}
        if not wanted:
            return {}
        folder = os.path.commonpath([os.path.dirname(key) for key in wanted])
        listed = self._listed(f"{folder}/" if folder else "")
        return {meta["path"]: meta["last_modified"].timestamp() for meta in listed if meta["path"] in wanted}

    def _where(self, key: str) -> str:
        return f"{self.uri}/{checked(key, self.uri)}"

    def _call(self, where: str, size: int, call: Callable[[], _T]) -> _T:
        _require_threads(where)
        with typed(where):
            return call_within(allowance(self._timeout_s, size), where, call)

    def _read(self, key: str, start: int, end: int) -> bytes:
        found = obstore.get(self._client, key, options={"range": (start, end)})
        whole = io.BytesIO()  # whose getvalue() copies nothing: a shard is held once
        for piece in found.stream(min_chunk_size=_PIECE):
            whole.write(piece)
        return whole.getvalue()

    def _listed(self, prefix: str) -> Sequence[ObjectMeta]:
        """Everything below a prefix of keys; obstore's own prefixes are folders, so the rest is compared here."""
        folder = prefix.rpartition("/")[0]
        where = self._where(folder) if folder else self.uri
        _require_threads(where)
        with typed(where):
            pages = iter(obstore.list(self._client, folder or None, chunk_size=_PAGE))
        found: list[ObjectMeta] = []
        limit = ListingLimit(self._timeout_s, f"listing {where}")
        while page := self._call(where, 0, lambda: next(pages, None)):
            found += [meta for meta in page if meta["path"].startswith(prefix)]
            limit.require_time()
        return found

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            obstore.delete(self._client, keys)
        except FileNotFoundError:
            for key in keys:  # a server without bulk deletion stops at the first that is missing
                try:
                    obstore.delete(self._client, key)
                except FileNotFoundError:
                    continue

    def _tag(self, meta: ObjectMeta | PutResult, where: str) -> str:
        tag = meta["version"] if self._by_version else meta["e_tag"]
        if tag is None:
            raise StoreError(f"{where}: the server gives objects no ETag, so a changed one cannot be told from another")
        return tag


def _require_threads(where: str) -> None:
    """Raise StoreError in a process forked from one that had used obstore, whose calls would never end."""
    global _user
    process = os.getpid()
    _user = _user or process
    if _user != process:
        raise StoreError(
            f"{where}: this process was forked from one ({_user}) that had used an object store, and obstore's threads "
            "do not survive a fork; start it by spawn, or use object stores only after the fork"
        )
