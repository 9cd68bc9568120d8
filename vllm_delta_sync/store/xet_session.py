"""hf_xet as this project uses it: one session a process, its settings, reads, and what its failures mean.

Does not know the Hub or any token. Nothing touches hf_xet before the first call, and a forked process begins anew.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.store.protocol import Content

SETTINGS: dict[str, Any] = {
    "client.connect_timeout": "10s",
    "client.read_timeout": "30s",
    "client.retry_max_attempts": 3,
    "client.retry_base_delay": "1s",
    "telemetry.enabled": False,
    # By default buffers grow with the machine's memory, to gigabytes; here a GPU worker shares the process.
    "reconstruction.download_buffer_size": "128mb",
    "reconstruction.download_buffer_perfile_size": "64mb",
    "reconstruction.download_buffer_limit": "256mb",
    "reconstruction.min_prefetch_buffer": "64mb",
}
"""Settings of hf_xet, each unless the user has set the environment variable HF_XET_<GROUP>_<NAME> of it."""

_CACHE = "HF_XET_CACHE"
_CACHE_NAME = "vllm-delta-sync-xet-"
_BUSY_S = 30.0
_QUERY = re.compile(r"\?\S*")  # of a URL that it names, which is signed

_lock = threading.Lock()
_sessions: dict[int, Any] = {}  # process id → its session, which does not survive a fork


class WrongSize(Unavailable):
    """A content is not of the size that was stated, if its transfer was not cut short."""


def read_stream(group: Any, content: Content, start: int, end: int, abandoned: threading.Event) -> bytes:
    """Bytes start … end−1 of a file, or another number of them: a stream may end early without an error.

    It ends early, too, once nobody waits for it any more.
    """
    from hf_xet import XetFileInfo

    data = bytearray()
    for chunk in group.download_stream(XetFileInfo(content.id, content.size), start, end):
        data += chunk
        if len(data) > end - start or abandoned.is_set():
            break
    return bytes(data)


def read_file(leave: dict[str, Any], content: Content, start: int, end: int) -> bytes:
    """The same through a temporary file of all of it: slower, but what goes wrong is always raised."""
    from hf_xet import XetFileInfo

    with tempfile.TemporaryDirectory(prefix=_CACHE_NAME) as directory:
        path = Path(directory, "file")
        with session().new_file_download_group(**leave) as group:
            group.start_download_file(XetFileInfo(content.id, content.size), str(path))
        with path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)


def failed(error: Exception, what: str) -> StoreError:
    """The typed error for what hf_xet raised; only its text tells the status that the Xet store answered."""
    if isinstance(error, StoreError):
        return error
    message = f"{what}: {type(error).__name__}: {_QUERY.sub('?…', str(error))}"
    if "size mismatch" in str(error):
        return WrongSize(f"{message}; the content is another one, or its transfer was cut short")
    found = re.search(r"HTTP status client error \((\d{3})", str(error))
    status = int(found[1]) if found else None
    if isinstance(error, FileNotFoundError) or status == 404:
        return NotFound(f"{message}; the Xet store has no such content")
    if isinstance(error, PermissionError) or status in (401, 403):
        return Unauthorized(f"{message}; the Xet store refuses the token that the Hub gave")
    if status == 429:
        return RateLimited(f"{message}; the Xet store asks for patience", _BUSY_S)
    return Unavailable(f"{message}; the transfer failed, its bytes were thrown away")


def settings(environment: Callable[[str], str | None]) -> dict[str, Any]:
    """Those of SETTINGS that the user has not decided in the environment."""
    return {
        key: value for key, value in SETTINGS.items() if environment("HF_XET_" + key.upper().replace(".", "_")) is None
    }


def session() -> Any:
    """The session of this process."""
    from hf_xet import XetConfig, XetSession

    process = os.getpid()
    with _lock:
        held = _sessions.get(process)
    if held is None:
        # Without the lock: in a forked process this has been seen not to return, and others must not wait for it.
        made = XetSession(config=XetConfig().with_config(settings(os.environ.get)))
        with _lock:
            if process not in _sessions:
                _sessions.clear()
                _sessions[process] = made
            held = _sessions[process]
    return held


def private_cache() -> None:
    """Give this process a cache for uploads of its own, unless the user chose one.

    Processes that share one have got into each other's way, and one that outlives its server names what is gone.
    """
    with _lock:
        chosen = os.environ.get(_CACHE)
        own = f"{_CACHE_NAME}{os.getpid()}-"
        if chosen is not None and (_CACHE_NAME not in chosen or own in chosen):
            return  # the user's, or already this process's; else inherited from a parent
        path = os.environ[_CACHE] = tempfile.mkdtemp(prefix=own)
        process = os.getpid()
        atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == process else None)
