"""What every store promises, run against every store and against a prefix of each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_delta_sync.errors import AlreadyExists, MalformedObject, NotFound
from vllm_delta_sync.store import Store, child, open_store

MAKERS: dict[str, Callable[[Path], Store]] = {
    "local": lambda path: open_store(str(path / "bucket")),
    "local-uri": lambda path: open_store((path / "a bucket").as_uri()),
    "child": lambda path: child(open_store(str(path / "bucket")), "run/inner"),
    "child-of-child": lambda path: child(child(open_store(str(path / "bucket")), "run"), "inner"),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MAKERS[request.param](tmp_path)


def test_what_was_put_is_read_back(store: Store) -> None:
    for key, data in {"a": b"", "deep/er/key.x": bytes(range(256)) * 3, "LATEST": b"{}"}.items():
        store.put(key, data)
        assert store.get(key) == data


def test_put_takes_any_buffer(store: Store) -> None:
    store.put("a", bytearray(b"xy"))
    store.put("b", memoryview(b"wxyz")[1:3])
    assert (store.get("a"), store.get("b")) == (b"xy", b"xy")


def test_a_range_is_read_and_cut_at_the_end_of_the_object(store: Store) -> None:
    store.put("a", b"0123456789")
    assert store.get("a", 2, 5) == b"234"
    assert store.get("a", 7) == b"789"
    assert store.get("a", 8, 99) == b"89"
    assert store.get("a", 10, 12) == b""
    assert store.get("a", 4, 4) == b""


def test_a_put_replaces_and_changes_the_tag(store: Store) -> None:
    store.put("a", b"one")
    first = store.head("a")
    store.put("a", b"two")
    second = store.head("a")
    assert (first.size, second.size) == (3, 3)
    assert first.tag != second.tag
    assert store.head("a") == second
    assert store.get("a") == b"two"


def test_create_refuses_a_taken_key_and_leaves_it(store: Store) -> None:
    store.put("v/a", b"one", create=True)
    with pytest.raises(AlreadyExists, match="v/a"):
        store.put("v/a", b"two", create=True)
    assert store.get("v/a") == b"one"
    assert list(store.list()) == ["v/a"]


def test_one_of_many_creators_wins(store: Store) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            store.put("only", str(number).encode(), create=True)
            won.append(number)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [store.get("only")]


def test_a_reader_sees_the_old_or_the_new_object_but_never_a_mixture(store: Store) -> None:
    old, new = b"o" * 100_000, b"n" * 150_000
    store.put("a", old)
    done = threading.Event()

    def write() -> None:
        for turn in range(20):
            store.put("a", (new, old)[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(store.get("a"))
    writer.join()
    assert seen <= {old, new}


def test_a_missing_object_is_not_found_by_name(store: Store) -> None:
    for call in (store.get, store.head):
        with pytest.raises(NotFound, match="no/such"):
            call("no/such")
    store.put("no/other", b"x")
    for call in (store.get, store.head):
        with pytest.raises(NotFound, match="no/such"):
            call("no/such")
        with pytest.raises(NotFound):
            call("no")


def test_keys_are_listed_sorted_below_a_prefix(store: Store) -> None:
    assert list(store.list()) == []
    for key in ("b/2", "b/10", "a", "b/1", "bc/1", "c/d/e"):
        store.put(key, b"x")
    assert list(store.list()) == ["a", "b/1", "b/10", "b/2", "bc/1", "c/d/e"]
    assert list(store.list("b/")) == ["b/1", "b/10", "b/2"]
    assert list(store.list("b")) == ["b/1", "b/10", "b/2", "bc/1"]
    assert list(store.list("b/1")) == ["b/1", "b/10"]
    assert list(store.list("nothing/here")) == []


def test_deleted_objects_are_gone_and_missing_ones_passed_over(store: Store) -> None:
    store.put("a", b"x")
    store.put("b", b"x")
    store.delete(["a", "never"])
    assert list(store.list()) == ["b"]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a b", "a\\b", "a\n", "ä", "a" * 513])
def test_a_key_that_breaks_the_rule_is_refused(store: Store, tmp_path: Path, key: str) -> None:
    for call in (store.get, store.head, lambda key: store.put(key, b"x"), lambda key: store.delete([key])):
        with pytest.raises(MalformedObject):
            call(key)
    assert not any(tmp_path.iterdir())


def test_nothing_half_written_is_left_or_listed(store: Store, tmp_path: Path) -> None:
    store.put("a/b", b"x")
    with pytest.raises(AlreadyExists):
        store.put("a/b", b"y", create=True)
    names = [name for _, _, files in os.walk(tmp_path) for name in files]
    assert names == ["b"]


def test_the_uri_names_the_store(store: Store) -> None:
    store.put("a", b"x")
    assert open_store(store.uri).get("a") == b"x"
