"""A store in a directory: atomic, durable, conditional writes, on any file system with atomic rename, link and flock.

Does not keep readers waiting: only writers that replace an object lock its directory.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from vllm_delta_sync.errors import (
    AlreadyExists,
    MalformedObject,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unauthorized,
    Unavailable,
)
from vllm_delta_sync.store.protocol import Content, ObjectInfo, checked
from vllm_delta_sync.wire.frames import Buffer

_TEMPORARY = ".writing-"  # begins the name of a file that is being written
_LOCK = ".locked"  # the file in a directory that whoever replaces an object there holds locked
_HIDDEN = (_TEMPORARY, _LOCK)  # what begins with these is no object

_TAGGED_BY_CONTENT = 1 << 16  # bytes; a larger object's tag is when and where it was written
_LOCK_DEADLINE_S = 30.0
_LEFT_OVER_S = 24 * 3600.0  # a file that nobody has written to for as long belongs to a writer that was killed


class LocalStore:
    """Objects as files below a root directory, which the first write creates."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    @property
    def conditional(self) -> bool:
        return True

    @property
    def metered(self) -> bool:
        return False

    def path(self, key: str) -> Path:
        """Where the object of a key is; raises MalformedObject for a key that breaks the rule or names no object."""
        if any(segment.startswith(_HIDDEN) for segment in checked(key, self.uri).split("/")):
            raise MalformedObject(f"{self.uri}: {key!r} is the name of a file that is being written, or of a lock")
        return self._root / key

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        target = self.path(key)
        temporary = target.with_name(_TEMPORARY + uuid.uuid4().hex)
        with _typed(self.uri, key):
            _make_directory(target.parent)
            _sweep(target.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                info = _info(temporary)
                if create:
                    _link(temporary, target)
                elif over is not None or not _linked(temporary, target):
                    with _locked(target.parent):
                        if over is not None:
                            self._require(key, over)
                        os.replace(temporary, target)
                _sync_directory(target.parent)
            finally:
                with suppress(OSError):
                    temporary.unlink()
        return info

    def _require(self, key: str, tag: str) -> None:
        try:
            found = _info(self.path(key)).tag
        except FileNotFoundError:
            found = "none"
        if found != tag:
            raise PreconditionFailed(f"{self.uri}/{key} was to replace what has tag {tag}, but {found} is there")

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        del content  # a directory knows its objects by key alone
        with _typed(self.uri, key), _opened(self.path(key)) as file:
            file.seek(start)
            return file.read(-1 if end is None else max(0, end - start))

    def opened(self, key: str) -> BufferedReader:
        with _typed(self.uri, key):
            return _opened(self.path(key))

    def head(self, key: str) -> ObjectInfo:
        with _typed(self.uri, key):
            return _info(self.path(key))

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        top = self._root / checked(folder, self.uri) if folder else self._root
        found = []
        with _typed(self.uri, prefix):
            for directory, _, names in os.walk(top, onerror=_unless_missing):
                base = Path(directory).relative_to(self._root)
                found += [(base / name).as_posix() for name in names if not name.startswith(_HIDDEN)]
        return iter(sorted(key for key in found if key.startswith(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with _typed(self.uri, key), suppress(FileNotFoundError):
                self.path(key).unlink()

    def modified(self, keys: Sequence[str]) -> dict[str, float]:
        found = {}
        for key in keys:
            with _typed(self.uri, key), suppress(FileNotFoundError, NotADirectoryError):
                found[key] = self.path(key).stat().st_mtime
        return found


def _opened(path: Path) -> BufferedReader:
    """A file for reading; raises FileNotFoundError also for what is none."""
    # Who else may write here may leave a pipe, whose other end nobody is to wait for.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise FileNotFoundError


def _info(path: Path) -> ObjectInfo:
    """What `head` tells of a file; raises as `_opened` does."""
    with _opened(path) as file:
        found = os.fstat(file.fileno())
        if found.st_size > _TAGGED_BY_CONTENT:
            return ObjectInfo(found.st_size, f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}")
        # Clocks of file systems are coarse and numbers of files used again: of small objects, which may be replaced
        # many times a second, only the content tells.
        return ObjectInfo(found.st_size, hashlib.blake2b(file.read(), digest_size=16).hexdigest())


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which ends with its holder, however that ends."""
    with (directory / _LOCK).open("ab") as file:
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EAGAIN, f"another writer holds {file.name} for {_LOCK_DEADLINE_S} s") from None
            time.sleep(0.005)
        yield


def _sweep(directory: Path) -> None:
    """Remove what writers that were killed have left in a directory."""
    with os.scandir(directory) as found:
        for entry in found:
            if entry.name.startswith(_TEMPORARY):
                with suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _LEFT_OVER_S:
                        os.unlink(entry.path)


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


def _linked(source: Path, target: Path) -> bool:
    """Whether the file has a new name now: most names are fresh, and take no lock."""
    try:
        os.link(source, target)
    except OSError:  # the name is taken, or the file system has no links
        return False
    return True


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
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
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
    except BlockingIOError as error:
        raise Unavailable(f"{where}: {error.strerror}; try again") from None
    except OSError as error:
        message = f"{where}: {error.strerror or error}"
        if error.errno == errno.EROFS:
            raise Unauthorized(f"{message}; the directory is mounted read-only") from error
        if error.errno == errno.ENAMETOOLONG:
            raise StoreError(f"{message}; a segment of the key is too long for this file system") from error
        raise Unavailable(f"{message}; free space or mend the disk, then try again") from error
