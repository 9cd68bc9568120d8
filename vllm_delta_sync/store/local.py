"""A store in a directory: atomic, durable writes, on any file system where rename and link are atomic.

Does not lock: writers of different keys never meet, and one key is replaced whole.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_delta_sync.config import file_path
from vllm_delta_sync.errors import (
    AlreadyExists,
    ConfigError,
    MalformedObject,
    NotFound,
    StoreError,
    Unauthorized,
    Unavailable,
)
from vllm_delta_sync.store.protocol import ObjectInfo, checked
from vllm_delta_sync.wire.frames import Buffer

_TEMPORARY = ".writing-"  # begins the name of a file that is being written; such keys are not objects


def open_uri(uri: str) -> LocalStore:
    """The store at file:///absolute/path or a plain path; raises ConfigError for a file URI that names a host."""
    try:
        return LocalStore(Path(file_path(uri)))
    except ValueError as error:
        raise ConfigError(f"cannot open: {error}; or give a plain path") from None


class LocalStore:
    """Objects as files below a root directory, which the first write creates."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    def path(self, key: str) -> Path:
        """Where the object of a key is; raises MalformedObject for a key that breaks the rule or names no object."""
        if any(segment.startswith(_TEMPORARY) for segment in checked(key, self.uri).split("/")):
            raise MalformedObject(f"{self.uri}: {key!r} is the name of a file that is being written")
        return self._root / key

    def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        target = self.path(key)
        temporary = target.with_name(_TEMPORARY + uuid.uuid4().hex)
        with _typed(self.uri, key):
            _make_directory(target.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                if create:
                    _link(temporary, target)
                else:
                    os.replace(temporary, target)
                _sync_directory(target.parent)
            finally:
                with suppress(OSError):
                    temporary.unlink()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with _typed(self.uri, key), self.path(key).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else max(0, end - start))

    def head(self, key: str) -> ObjectInfo:
        with _typed(self.uri, key):
            found = os.stat(self.path(key))
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError
        return ObjectInfo(found.st_size, f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}")

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        top = self._root / checked(folder, self.uri) if folder else self._root
        found = []
        with _typed(self.uri, prefix):
            for directory, _, names in os.walk(top, onerror=_unless_missing):
                base = Path(directory).relative_to(self._root)
                found += [(base / name).as_posix() for name in names if not name.startswith(_TEMPORARY)]
        return iter(sorted(key for key in found if key.startswith(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with _typed(self.uri, key), suppress(FileNotFoundError):
                self.path(key).unlink()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise StoreError(
            f"{target}: {error.strerror}: this file system has no hard links, by which an object appears whole and "
            "never over another one; put the bucket on one that has them"
        ) from error


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _typed(uri: str, key: str) -> Iterator[None]:
    """Raise the store's typed error for any OSError inside."""
    where = f"{uri}/{key}"
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotFound(f"{where} does not exist") from None
    except FileExistsError:
        raise AlreadyExists(f"{where} already exists") from None
    except PermissionError as error:
        raise Unauthorized(f"{where}: {error.strerror}; check the owner and mode of the directory") from error
    except OSError as error:
        message = f"{where}: {error.strerror or error}"
        if error.errno == errno.EROFS:
            raise Unauthorized(f"{message}; the directory is mounted read-only") from error
        if error.errno == errno.ENAMETOOLONG:
            raise StoreError(f"{message}; a segment of the key is too long for this file system") from error
        raise Unavailable(f"{message}; free space or mend the disk, then try again") from error
