"""What the readers of one run on this node need together, so that one of them can fetch it for all.

Does not fetch, and trusts nobody: what a foreign file says only ever makes a reader fetch more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.log import locks
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.needs import MAX_BYTES, Needs


class Neighbours:
    """This reader's needs, known to all others at the same cache until it is closed, let go, or its process ends.

    Args:
        where: the URI of the run, the same for all its readers.

    Raises CacheError when the cache's directory cannot be used, as `together` does.
    """

    def __init__(self, cache: NodeCache, where: str, needs: Needs) -> None:
        self._cache, self._needs = cache, needs
        scope = hashlib.blake2b(where.encode(), digest_size=16).hexdigest()
        self._directory = cache.directory / ".needs" / scope
        self._path = self._directory / uuid.uuid4().hex
        self._known: tuple[frozenset[str], Needs] = frozenset(), needs
        self._release: Callable[[], object] = lambda: None
        with cache.typed():
            self._register()

    def _register(self) -> None:
        self._cache.prepare()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._cache.locked():
            handle = os.open(self._path, locks.CREATE | os.O_EXCL, 0o600)
            self._release()
            self._release = weakref.finalize(self, os.close, handle)  # also when this reader is just let go
            fcntl.flock(handle, fcntl.LOCK_EX)
            with open(handle, "wb", closefd=False) as file:
                file.write(self._needs.to_bytes())

    def together(self) -> Needs:
        """What all readers that live now need."""
        with self._cache.typed():
            if not self._path.exists():  # someone cleared the cache
                self._register()
            with self._cache.locked():
                self._look()
        return self._known[1]

    def _look(self) -> None:
        files = [Path(item) for item in os.scandir(self._directory) if item.is_file(follow_symlinks=False)]
        alive = [path for path in files if not locks.remove_if_free(path)]
        names = frozenset(path.name for path in alive)
        if names != self._known[0]:
            others = [_read(path) for path in alive if path != self._path]
            self._known = names, self._needs.with_those_of(needs for needs in others if needs is not None)

    def close(self) -> None:
        """Let the others no longer fetch for this reader."""
        with contextlib.suppress(OSError):  # once it is not locked any more, whoever looks next removes it
            self._path.unlink()
        self._release()


def _read(path: Path) -> Needs | None:
    """None for a file that is gone by now, or says nothing that can be understood."""
    try:
        with open(os.open(path, locks.READ), "rb") as file:
            return Needs.from_bytes(file.read(MAX_BYTES + 1), str(path))
    except (FileNotFoundError, MalformedObject):
        return None
