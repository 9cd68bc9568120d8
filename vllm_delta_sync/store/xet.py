"""Moves the bytes of a bucket's files to and from the Xet store behind the Hub, by leave of the Hub.

Does not verify them: hf_xet does not either, and a wrong byte comes through.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_delta_sync.errors import Unauthorized, Unavailable
from vllm_delta_sync.store.deadline import call_within
from vllm_delta_sync.store.hub import Hub
from vllm_delta_sync.store.leaves import Leave, leave
from vllm_delta_sync.store.patience import allowance
from vllm_delta_sync.store.protocol import Content
from vllm_delta_sync.store.xet_session import WrongSize, failed, private_cache, read_file, read_stream, session
from vllm_delta_sync.wire.frames import Buffer

HASH = re.compile(r"[0-9a-f]{64}")

_STREAM_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Downloads:
    """A group of downloads that share connections. A failure of one spoils the group for all."""

    process: int
    leave: Leave
    group: Any


class XetTransfers:
    """Uploads to and downloads from one bucket; safe to use from several threads.

    Args:
        hub: where tokens come from.
        bucket: its id, namespace/name.
        timeout_s: seconds that a transfer may take, beyond what its size allows.
    """

    def __init__(self, hub: Hub, bucket: str, timeout_s: float) -> None:
        self._hub = hub
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._downloads: _Downloads | None = None

    def download(self, content: Content, start: int, end: int, what: str) -> bytes:
        """Bytes start … end−1 of a file, all of which must exist by its stated size.

        Raises:
            NotFound: the Xet store has no such file.
            WrongSize: it is of another size than stated, or the transfer was cut short each time.
            Unauthorized, RateLimited, Unavailable: as the Hub or the Xet store refuses.
        """
        abandoned = threading.Event()
        transfer = partial(self._download, content, start, end, what, abandoned)
        try:
            return call_within(allowance(self._timeout_s, end - start), what, transfer, abandoned)
        finally:
            if abandoned.is_set() and (hung := self._downloads) is not None:
                self._drop(hung)

    def upload(self, data: Buffer, what: str) -> Content:
        """Store bytes durably and name them; no path leads to them yet. Raises as `download` does."""
        return call_within(allowance(self._timeout_s, len(data)), what, lambda: self._upload(data, what))

    def _download(self, content: Content, start: int, end: int, what: str, abandoned: threading.Event) -> bytes:
        """A first try in the group that all downloads share; what fails there is tried again in groups of its own.

        Only those tell what is wrong with this download, not with another one, or with a leave that ended early; and
        when a stream just ends, as with hf_xet 1.8 one in four does that fails at once, only a file tells at all.
        Nothing is fetched any more for a caller who has given up: a hang that ends would else move bytes for many.
        """
        shared = self._shared(what)
        try:
            _require_wanted(abandoned, what)
            data = read_stream(shared.group, content, start, end, abandoned)
            if len(data) == end - start:
                return data
        except Exception:  # mostly bare RuntimeError and ConnectionError
            pass
        self._drop(shared)
        _require_wanted(abandoned, what)
        arguments = leave(self._hub, self._bucket, "read", what, other_than=shared.leave).arguments
        try:
            for _ in range(_STREAM_TRIES):
                _require_wanted(abandoned, what)
                data = read_stream(session().new_download_stream_group(**arguments), content, start, end, abandoned)
                if len(data) == end - start:
                    return data
            _require_wanted(abandoned, what)
            data = read_file(arguments, content, start, end)
        except Exception as error:
            raise failed(error, what) from error
        if len(data) != end - start:
            raise WrongSize(f"{what}: {len(data)} bytes came where {end - start} were asked for")
        return data

    def _upload(self, data: Buffer, what: str) -> Content:
        from hf_xet import SKIP_SHA256

        private_cache()
        old: Leave | None = None
        while True:
            held = leave(self._hub, self._bucket, "write", what, other_than=old)
            try:
                with session().new_upload_commit(**held.arguments) as commit:
                    handle = commit.start_upload_bytes(data, sha256=SKIP_SHA256)
                stored = handle.result().xet_info
                return Content(stored.hash, stored.file_size)
            except Exception as error:
                failure = failed(error, what)
                if old is not None or not isinstance(failure, Unauthorized):
                    raise failure from error
                old = held

    def _shared(self, what: str) -> _Downloads:
        held = leave(self._hub, self._bucket, "read", what)
        found = self._downloads
        if found is None or found.process != os.getpid() or found.leave is not held:
            # Without the lock, which one that does not come back would keep from all who then give up on it.
            made = _Downloads(os.getpid(), held, session().new_download_stream_group(**held.arguments))
            with self._lock:
                if self._downloads is found:  # else another thread was first
                    self._downloads = made
                return self._downloads or made
        return found

    def _drop(self, downloads: _Downloads) -> None:
        # Without aborting it: that would cut others' downloads short, silently. What hangs ends by hf_xet's own limits.
        with self._lock:
            if self._downloads is downloads:
                self._downloads = None


def _require_wanted(abandoned: threading.Event, what: str) -> None:
    if abandoned.is_set():
        raise Unavailable(f"{what}: given up")
