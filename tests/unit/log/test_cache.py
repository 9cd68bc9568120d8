"""The cache of a node: whole entries or none, one maker each, bounded, and never taken on trust."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from vllm_delta_sync.errors import CacheError, DigestMismatch
from vllm_delta_sync.log import locks
from vllm_delta_sync.log.cache import NodeCache, Write
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.log.neighbours import Neighbours

A, B, C, D = (letter * 64 for letter in "abcd")


def filled(letter: bytes, size: int = 10):  # type: ignore[no-untyped-def]
    return lambda write: write(0, letter * size)


def refused(write: Write) -> None:
    write(0, b"wrong")
    raise DigestMismatch("not what was stated")


def never(write: Write) -> None:
    raise AssertionError("made again")


def entries(cache: NodeCache) -> list[str]:
    return sorted(path.name for path in cache.directory.iterdir() if not path.name.startswith("."))


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", 100, patience_s=0.2)


def test_what_was_made_is_found_by_everyone_with_its_size(cache: NodeCache) -> None:
    assert cache.find(A, 10) is None
    made = cache.make(A, 10, filled(b"a"))
    other = NodeCache(cache.directory, 100)
    found = other.find(A, 10)
    assert found is not None and not found.fresh and found.read(0, 100) == b"a" * 10
    assert not other.make(A, 10, never).fresh
    assert other.find(A, 11) is None
    assert made.fresh and made.read(0, 100) == b"a" * 10


def test_what_could_not_be_verified_leaves_nothing(cache: NodeCache) -> None:
    with pytest.raises(DigestMismatch):
        cache.make(A, 10, refused)
    assert cache.find(A, 10) is None
    assert [path.name for path in cache.directory.iterdir() if "writing" in path.name] == []


def test_a_spoilt_entry_is_made_anew_once(cache: NodeCache) -> None:
    cache.make(A, 10, filled(b"x"))
    first, second = cache.find(A, 10), cache.find(A, 10)
    assert cache.make(A, 10, filled(b"a"), first).fresh
    again = cache.make(A, 10, never, second)  # the other reader found it spoilt too, and comes later
    assert again.read(0, 100) == b"a" * 10


def test_those_least_recently_used_go_first(cache: NodeCache) -> None:
    for name in (A, B, C):
        cache.make(name, 30, filled(b"x", 30))
    for age, name in enumerate((C, B, A)):
        os.utime(cache.directory / name, (1000 - age, 1000 - age))
    assert cache.find(A, 30) is not None  # used now
    cache.make(D, 30, filled(b"d", 30))
    assert entries(cache) == [A, C, D]


def test_what_is_in_use_stays_and_what_does_not_fit_beside_it_is_refused(cache: NodeCache) -> None:
    held = cache.make(A, 60, filled(b"a", 60))
    with pytest.raises(
        CacheError, match=r"no room for 50 bytes: it may hold 100, and 60 are in use; raise cache_bytes"
    ):
        cache.make(B, 50, filled(b"b", 50))
    assert entries(cache) == [A] and held.read(0, 100) == b"a" * 60
    del held
    cache.make(B, 50, filled(b"b", 50))
    assert entries(cache) == [B]


def test_an_entry_in_the_making_counts(cache: NodeCache) -> None:
    def fill(write: Write) -> None:
        with pytest.raises(CacheError, match="no room"):
            NodeCache(cache.directory, 100).make(B, 50, never)
        write(0, b"a" * 60)

    assert cache.make(A, 60, fill).fresh


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(cache: NodeCache) -> None:
    cache.make(A, 10, filled(b"a"))
    left, writing = (cache.directory / f".writing-{name}.{0:032x}" for name in (B, C))
    left.write_bytes(bytes(90))
    writing.write_bytes(bytes(30))
    handle = os.open(writing, os.O_RDWR)
    assert locks.take(handle)
    cache.make(D, 60, filled(b"d", 60))
    assert not left.exists() and writing.exists()
    os.close(handle)


@pytest.mark.parametrize("name", ["thesis.tex", "a" * 63, "A" * 64, "a" * 64 + "-x", ".writing-thesis"])
def test_what_is_no_entry_neither_counts_nor_goes_to_make_room(cache: NodeCache, name: str) -> None:
    cache.make(A, 60, filled(b"a", 60))
    own = cache.directory / name
    own.write_bytes(bytes(1000))
    cache.make(B, 60, filled(b"b", 60))
    assert own.stat().st_size == 1000 and not (cache.directory / A).exists()


def test_exclusive_locks_are_taken_on_handles_open_for_writing(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS demands, where flock is a lock on a range."""
    lock = fcntl.flock

    def flock(handle: int, operation: int) -> None:
        access = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
        if (operation & fcntl.LOCK_EX and access == os.O_RDONLY) or (
            operation & fcntl.LOCK_SH and access == os.O_WRONLY
        ):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    cache.make(A, 60, filled(b"a", 60))
    (cache.directory / f".writing-{C}.{0:032x}").write_bytes(bytes(30))
    cache.make(B, 60, filled(b"b", 60))
    assert entries(cache) == [B] and cache.find(B, 60) is not None
    readers = [Neighbours(cache, "file:///run", Needs({name: ((0, 1),)})) for name in "xy"]
    assert readers[0].together() == readers[1].together() == Needs({"x": ((0, 1),), "y": ((0, 1),)})


def test_a_second_maker_waits_for_the_first_and_takes_what_it_made(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", 100)
    begun, go = threading.Event(), threading.Event()

    def slow(write: Write) -> None:
        begun.set()
        assert go.wait(10)
        write(0, b"a" * 10)

    first = threading.Thread(target=lambda: cache.make(A, 10, slow))
    first.start()
    assert begun.wait(10)
    threading.Timer(0.1, go.set).start()
    assert not NodeCache(cache.directory, 100).make(A, 10, never).fresh
    first.join()


def test_a_maker_that_does_nothing_is_not_waited_for_for_ever(cache: NodeCache) -> None:
    def stuck(write: Write) -> None:
        with pytest.raises(CacheError, match="nothing happened"):
            NodeCache(cache.directory, 100, patience_s=0.05).make(A, 10, never)
        write(0, b"a" * 10)

    assert cache.make(A, 10, stuck).fresh


def test_a_slow_maker_that_goes_on_writing_is_waited_for(tmp_path: Path) -> None:
    now, seen = [0.0], iter("abb")
    path = tmp_path / "lock"
    handle = os.open(path, locks.CREATE)
    assert locks.take(handle)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(CacheError), locks.alone(path, 1.0, lambda: next(seen), sleep):
        raise AssertionError("held by two")
    os.close(handle)
    assert 1.9 < now[0] < 2.3  # b after one second gives it another one, in which nothing comes


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.joinpath("cache").mkdir()
    tmp_path.joinpath("cache").chmod(mode)
    with pytest.raises(CacheError, match=f"mode {mode:o}"):
        NodeCache(tmp_path / "cache", 100).find(A, 1)


def test_the_directory_is_made_for_this_user_only(cache: NodeCache) -> None:
    cache.make(A, 10, filled(b"a"))
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert (cache.directory / A).stat().st_mode & 0o777 == 0o600


def test_what_the_system_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match=r"file/cache.*Not a directory"):
        NodeCache(tmp_path / "file" / "cache", 100).find(A, 1)


@pytest.mark.parametrize("kind", ["link", "pipe", "longer"])
def test_anything_else_under_an_entry_s_name_is_replaced_and_not_followed(cache: NodeCache, kind: str) -> None:
    cache.find(A, 10)
    path, outside = cache.directory / A, cache.directory.parent / "outside"
    outside.write_bytes(b"secret....")
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(bytes(11))
    assert cache.make(A, 10, filled(b"a")).read(0, 100) == b"a" * 10
    assert outside.read_bytes() == b"secret...." and not path.is_symlink()
