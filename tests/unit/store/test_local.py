"""The local directory as a store: its URIs, its typed errors, and how it writes."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from vllm_delta_sync import config
from vllm_delta_sync.errors import (
    AlreadyExists,
    ConfigError,
    MalformedObject,
    NotFound,
    PreconditionFailed,
    StoreError,
    Unauthorized,
    Unavailable,
)
from vllm_delta_sync.store import child, local, open_store
from vllm_delta_sync.store.deadline import call_within
from vllm_delta_sync.store.local import LocalStore


@pytest.mark.parametrize("uri", ["gopher://bucket/x", "://x", ""])
def test_an_unknown_scheme_is_refused_with_the_known_ones(uri: str) -> None:
    with pytest.raises(ConfigError, match="file://"):
        open_store(uri)


def test_a_file_uri_with_a_host_is_refused() -> None:
    for uri in ("file://bucket/run", "file://localhostess/run", "file://"):
        with pytest.raises(ConfigError, match="three slashes"):
            open_store(uri)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///mnt/a#b", "/mnt/a#b"),
        ("file:///mnt/a?b", "/mnt/a?b"),
        ("file:///mnt/a%23b%20c", "/mnt/a#b c"),
        ("file://localhost/mnt/a", "/mnt/a"),
        ("/mnt/a%20b", "/mnt/a%20b"),
    ],
)
def test_a_uri_is_the_same_directory_to_a_trainer_and_to_a_server(uri: str, path: str) -> None:
    assert open_store(uri).uri == Path(path).as_uri()
    assert config.parse({"store": uri}, "here").store.uri == Path(path).as_uri()


def test_a_path_and_its_uri_are_the_same_store(tmp_path: Path) -> None:
    place = tmp_path / "with space"
    open_store(str(place)).put("a", b"x")
    assert open_store(place.as_uri()).get("a") == b"x"
    assert child(open_store(str(place)), "run").uri == place.as_uri() + "/run"


def test_opening_and_reading_create_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "bucket"))
    with pytest.raises(NotFound):
        store.get("RUN")
    assert list(store.list()) == []
    assert not any(tmp_path.iterdir())


def test_a_file_where_the_directory_should_be_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_bytes(b"")
    with pytest.raises(NotFound):
        open_store(str(tmp_path / "bucket")).get("RUN")


def test_nothing_is_listed_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "versions").write_bytes(b"")
    assert list(LocalStore(tmp_path).list("versions/")) == []


@pytest.mark.parametrize("name", ["get", "head", "opened"])
def test_nobody_waits_for_the_other_end_of_a_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "LATEST")
    with pytest.raises(NotFound):
        call_within(5, "reading", lambda: getattr(LocalStore(tmp_path), name)("LATEST"))


def test_a_file_being_written_is_no_object(tmp_path: Path) -> None:
    (tmp_path / ".writing-1").write_bytes(b"half")
    store = LocalStore(tmp_path)
    assert list(store.list()) == []
    with pytest.raises(MalformedObject, match="being written"):
        store.get(".writing-1")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, Unauthorized),
        (errno.EPERM, Unauthorized),
        (errno.EROFS, Unauthorized),
        (errno.ENOSPC, Unavailable),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
    ],
)
def test_a_failing_disk_is_a_typed_error_and_leaves_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError]
) -> None:
    store = LocalStore(tmp_path)
    store.put("v/a", b"old")

    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(kind, match="v/a"):
            store.put("v/a", b"new")
    assert store.get("v/a") == b"old"
    assert {path.name for path in (tmp_path / "v").iterdir()} == {"a"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StoreError, match=r"v/a: .* no hard links") as caught:
        LocalStore(tmp_path).put("v/a", b"x", create=True)
    assert not isinstance(caught.value, Unauthorized | Unavailable)
    assert list((tmp_path / "v").iterdir()) == []


def test_a_segment_too_long_for_the_file_system_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too long"):
        LocalStore(tmp_path).put("a" * 300, b"x")


def test_nothing_half_written_is_left_or_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    with pytest.raises(AlreadyExists):
        store.put("a/b", b"y", create=True)
    assert {path.name for path in (tmp_path / "a").iterdir()} <= {"b", ".locked"}
    assert list(store.list()) == ["a/b"]


def test_file_and_directory_are_synced_before_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    monkeypatch.setattr(os, "fsync", record)
    LocalStore(tmp_path).put("new/a", b"x")
    assert synced[0] == tmp_path.name
    assert synced[1].startswith(".writing-")
    assert synced[2] == "new"


def test_of_many_that_replace_the_same_object_one_wins(tmp_path: Path) -> None:
    tag = LocalStore(tmp_path).put("a", b"old").tag
    outcomes: list[str] = []

    def replace(number: int) -> None:
        try:
            LocalStore(tmp_path).put("a", str(number).encode(), over=tag)
            outcomes.append(str(number))
        except PreconditionFailed:
            outcomes.append("refused")

    threads = [threading.Thread(target=replace, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 7
    assert LocalStore(tmp_path).get("a").decode() in outcomes


def test_an_object_that_is_not_there_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(PreconditionFailed, match="none is there"):
        LocalStore(tmp_path).put("v/a", b"x", over="tag")
    assert list(LocalStore(tmp_path).list()) == []


def test_the_tags_of_a_small_object_tell_contents_apart_however_fast_they_follow(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, path = store.put("LATEST", b"one"), tmp_path / "LATEST"
    times = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.head("LATEST").tag != first.tag
    big = [store.put("big", bytes([number]) * 100_000) for number in range(2)]
    assert store.head("big") == big[1] != big[0]


def test_what_killed_writers_left_is_swept_when_it_is_old_and_a_write_under_way_is_not(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    old, fresh = (tmp_path / "v" / f".writing-{name}" for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    LocalStore(tmp_path).put("v/a", b"x", create=True)
    assert {path.name for path in (tmp_path / "v").iterdir()} == {"a", fresh.name}


def test_a_lock_that_is_never_given_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"w")
    store.put("a", b"x")
    monkeypatch.setattr(local, "_LOCK_DEADLINE_S", 0.05)
    with (tmp_path / ".locked").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=r"a: another writer holds"):
            store.put("a", b"y")
    assert store.get("a") == b"x"
    store.put("a", b"y")


def test_a_lock_is_no_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"w")
    store.put("a", b"x")
    assert (tmp_path / ".locked").exists()
    assert list(store.list()) == ["a"]
    with pytest.raises(MalformedObject, match="of a lock"):
        store.delete([".locked"])


def test_a_fresh_name_needs_no_lock_and_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path).put("v/a", b"x")
    assert {path.name for path in (tmp_path / "v").iterdir()} == {"a"}

    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)
    LocalStore(tmp_path).put("w/a", b"x")
    assert LocalStore(tmp_path).get("w/a") == b"x"
