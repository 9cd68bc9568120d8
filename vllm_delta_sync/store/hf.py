"""Hugging Face buckets as a store: `hf://buckets/<namespace>/<name>[/prefix]`.

Does not promise what a bucket cannot: creating and replacing look first and write then, so a rival at the same moment
is not held off. A bucket that is not there is created, private, by the first write.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urljoin

from vllm_delta_sync.config import HfStoreConfig
from vllm_delta_sync.errors import NotFound, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.store import unconditional
from vllm_delta_sync.store.batch import Batch
from vllm_delta_sync.store.hub import XET_HASH, Answer, Hub, no_hub, same_origin
from vllm_delta_sync.store.hub_events import changes
from vllm_delta_sync.store.patience import ListingLimit
from vllm_delta_sync.store.protocol import Content, ObjectInfo, Store, checked
from vllm_delta_sync.store.within import child
from vllm_delta_sync.store.xet import HASH, XetTransfers
from vllm_delta_sync.store.xet_session import WrongSize
from vllm_delta_sync.wire.frames import Buffer

_BATCH = 1000  # operations, or paths, in one request

_T = TypeVar("_T")


def open_configured(config: HfStoreConfig, timeout_s: float) -> Store:
    """The store that the settings name, as whoever the environment says."""
    store = HfStore(config.bucket, Hub(config.endpoint_url, timeout_s), timeout_s)
    return child(store, config.prefix) if config.prefix else store


class HfStore:
    """A bucket through huggingface_hub and hf_xet.

    A tag is a file's Xet hash, and so is its content id: with one, `get` asks the Hub for nothing but a token now and
    then.

    Args:
        bucket: namespace/name.
        hub: where it is.
        timeout_s: seconds for moving an object, beyond those that its size allows, and for one page of a list.
    """

    conditional = False
    metered = True

    def __init__(self, bucket: str, hub: Hub, timeout_s: float) -> None:
        self._bucket = bucket
        self._hub = hub
        self._timeout_s = timeout_s
        self._xet = XetTransfers(hub, bucket, timeout_s)

    @property
    def uri(self) -> str:
        return f"hf://buckets/{self._bucket}"

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        self._what("writing", key)
        unconditional.check(self, key, create=create, over=over)
        with self.batch() as batch:
            return batch.put(key, data)

    @contextmanager
    def batch(self) -> Iterator[Batch]:
        """As `batch.Batching` promises: contents go to the Xet store as they come, and one request names them all."""
        uploads = _Uploads(self._upload)
        yield uploads
        for some in _batches(uploads.done):
            self._in_bucket(partial(self._name, {key: uploads.done[key] for key in some}))

    def _upload(self, key: str, data: Buffer) -> Content:
        what = self._what("writing", key)
        return self._in_bucket(lambda: self._xet.upload(data, what))

    def _name(self, contents: Mapping[str, Content]) -> None:
        first = next(iter(contents))
        what = self._what("writing", first) + (f" and {len(contents) - 1} more" if len(contents) > 1 else "")
        now = int(time.time() * 1000)
        failures = self._batch(
            [{"type": "addFile", "path": key, "xetHash": found.id, "mtime": now} for key, found in contents.items()],
            what,
        )
        for path, why in failures.items():
            raise Unavailable(f"{what}: the Hub did not take {path}: {why}")

    def _in_bucket(self, write: Callable[[], _T]) -> _T:
        """What `write` returns, in a bucket that is made if there is none."""
        try:
            return write()
        except NotFound:
            self._create_bucket()
            return write()

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        what = self._what("reading", key)
        # An id of another form is another store's: this log was copied from there.
        if content is not None and HASH.fullmatch(content.id):
            try:
                return self._read(content, start, end, what)
            except (NotFound, WrongSize):  # an id is a hint; the key may lead to the bytes
                pass
        found = self.head(key)
        return self._read(Content(found.tag, found.size), start, end, what)

    def _read(self, content: Content, start: int, end: int | None, what: str) -> bytes:
        end = content.size if end is None else min(end, content.size)
        return self._xet.download(content, start, end, what) if start < end else b""

    def head(self, key: str) -> ObjectInfo:
        what = self._what("looking up", key)
        answer = self._hub.ask(what, "HEAD", f"/buckets/{self._bucket}/resolve/{quote(key, safe='')}")
        tag = answer.headers.get(XET_HASH, "")
        own_length = answer.headers.get("content-length", "") if answer.status < 300 else ""
        size = answer.headers.get("x-linked-size") or own_length
        if not HASH.fullmatch(tag) or not re.fullmatch(r"\d{1,18}", size):
            raise no_hub(what, "the answer states no Xet hash and size")
        return ObjectInfo(int(size), tag, tag)

    def list(self, prefix: str = "") -> Iterator[str]:
        # Up to the last slash: the Hub may take a prefix for letters or for a folder, and this is right as either.
        folder = prefix.rpartition("/")[0]
        if folder:
            checked(folder, self.uri)
        return iter(sorted(path for path in self._tree(folder) if path.startswith(prefix)))

    def _tree(self, folder: str) -> Iterator[str]:
        what = f"listing {self.uri}"
        url = f"/api/buckets/{self._bucket}/tree{'/' + quote(folder, safe='') if folder else ''}?recursive=true"
        limit = ListingLimit(self._timeout_s, what)
        try:
            answer = self._hub.ask(what, "GET", url)
        except NotFound:  # the bucket, or the folder
            return
        while True:
            yield from _files(answer.json(what), what)
            following = next_page(answer, self._hub.endpoint)
            if following is None:
                return
            limit.require_time()
            try:
                answer = self._hub.ask(what, "GET", following)
            except NotFound as error:  # half of a list must not be taken for a whole one
                raise Unavailable(f"{error}; the list broke off, as its place was lost") from error

    def delete(self, keys: Iterable[str]) -> None:
        what = f"deleting from {self.uri}"
        for some in _batches(checked(key, self.uri) for key in keys):
            try:
                failures = self._batch([{"type": "deleteFile", "path": key} for key in some], what)
            except NotFound:  # the bucket itself
                return
            # Nobody says how the Hub answers to a path that does not exist; what is left tells.
            left = sorted(self._described(tuple(failures), what)) if failures else []
            if left:
                raise Unavailable(f"{what}: {len(left)} objects are left, the first is {left[0]}: {failures[left[0]]}")

    def modified(self, keys: Sequence[str]) -> dict[str, float]:
        """As `protocol.Dated` promises."""
        found: dict[str, float] = {}
        for some in _batches(checked(key, self.uri) for key in keys):
            for key, row in self._described(some, f"dating objects of {self.uri}").items():
                with suppress(KeyError, TypeError, ValueError):
                    found[key] = datetime.fromisoformat(row["uploadedAt"]).timestamp()
        return found

    def _described(self, keys: Sequence[str], what: str) -> dict[str, dict[str, Any]]:
        """What the Hub says of each file; those that do not exist are left out."""
        body = json.dumps({"paths": [*keys]}).encode()
        answer = self._hub.ask(what, "POST", f"/api/buckets/{self._bucket}/paths-info", body=body)
        return {path: row for path, row in _files(answer.json(what), what).items() if path in keys}

    def changes(self, key: str, stop: threading.Event) -> Iterator[None]:
        """As `watch.Watchable` promises, by the Hub's feed of server-sent events."""
        return changes(self._hub, self._bucket, checked(key, self.uri), stop)

    def _what(self, doing: str, key: str) -> str:
        """What is done to which object, for messages; raises MalformedObject for a key that breaks the rule."""
        return f"{doing} {self.uri}/{checked(key, self.uri)}"

    def _batch(self, operations: Sequence[dict[str, Any]], what: str) -> dict[str, str]:
        """Send operations in one request, which is no transaction; returns those that failed, path → why."""
        body = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
        url = f"/api/buckets/{self._bucket}/batch"
        answer = self._hub.ask(what, "POST", url, body=body, kind="application/x-ndjson", passed=(422,))
        said = answer.json(what)
        if not isinstance(said, dict):
            raise no_hub(what, "the answer to a batch is no object")
        failed = said.get("failed") or ()
        if not isinstance(failed, list | tuple) or not all(isinstance(item, dict) for item in failed):
            raise no_hub(what, "the answer to a batch lists no failures")
        failures = {str(item.get("path")): str(item.get("error")) for item in failed}
        done = said.get("succeeded", len(operations) - len(failures))
        if done != len(operations) - len(failures) or (answer.status == 422 and not failures):
            raise Unavailable(f"{what}: the Hub did {done} of {len(operations)} operations: {answer.body[:200]!r}")
        return failures

    def _create_bucket(self) -> None:
        what = f"creating the bucket {self._bucket}"
        try:
            body = json.dumps({"visibility": "private"}).encode()
            self._hub.ask(what, "POST", f"/api/buckets/{self._bucket}", body=body, passed=(409,))
        except NotFound as error:
            raise Unauthorized(f"{error}; the namespace does not exist, or this token may not create in it") from error


@dataclass(frozen=True)
class _Uploads:
    """Contents that are in the Xet store, for the names that they are to have."""

    upload: Callable[[str, Buffer], Content]
    done: dict[str, Content] = field(default_factory=dict)

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        stored = self.done[key] = self.upload(key, data)
        return ObjectInfo(stored.size, stored.id, stored.id)


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    every = list(keys)
    return (every[first : first + _BATCH] for first in range(0, len(every), _BATCH))


def _files(rows: Any, what: str) -> dict[str, dict[str, Any]]:
    """The files of a list of files and folders, by path."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise no_hub(what, "the answer is no list of files")
    return {str(row.get("path")): row for row in rows if row.get("type") == "file"}


def next_page(answer: Answer, endpoint: str) -> str | None:
    """The URL of the next page, where the Hub names one that may be asked with its token."""
    found = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', answer.headers.get("link", ""))
    if found is None:
        return None
    url = urljoin(endpoint, str(found[1]))
    if not same_origin(url, endpoint):
        raise StoreError(f"the next page of a list is at {url[:200]}, which is not the Hub {endpoint}")
    return url
