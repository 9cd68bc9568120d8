"""What every store promises, run against every store and against a prefix of some."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest

from vllm_delta_sync.errors import AlreadyExists, MalformedObject, NotFound, PreconditionFailed
from vllm_delta_sync.store import Store, together
from vllm_delta_sync.store.protocol import Content, Dated

PART = 8 << 20  # bytes beyond which some stores send an object in parts


def at_once(count: int, act: Callable[[int], None]) -> None:
    """Run `act(0)` … `act(count−1)` on threads of their own, from the same moment."""
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        act(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_was_put_is_read_back(store: Store) -> None:
    for key, data in {"a": b"", "deep/er/key.x": bytes(range(256)) * 3, "LATEST": b"{}"}.items():
        store.put(key, data)
        assert store.get(key) == data


def test_a_large_object_is_read_back_whole_and_in_parts(store: Store) -> None:
    data = bytes(range(251)) * (PART // 251) + b"the last part" * 1000
    told = store.put("large", data)
    assert told.size == store.head("large").size == len(data)
    assert store.get("large") == data
    assert store.get("large", PART - 5, PART + 5) == data[PART - 5 : PART + 5]


def test_what_is_put_together_is_there_at_the_end_and_told_at_once(store: Store) -> None:
    wanted = {f"v/{number}": bytes([number]) * 1000 for number in range(3)}
    with together(store) as batch:
        told = {key: batch.put(key, data) for key, data in wanted.items()}
    assert {key: store.get(key) for key in store.list("v/")} == wanted
    for key, info in told.items():
        assert store.head(key) == info
        content = None if info.content is None else Content(info.content, info.size)
        assert store.get(key, content=content) == wanted[key]


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
    assert store.get("a", 12) == b""
    assert store.get("a", 4, 4) == b""


def test_an_empty_object_has_no_bytes_in_any_range(store: Store) -> None:
    store.put("none", b"")
    assert store.head("none").size == 0
    assert store.get("none", 0, 100) == b""
    assert store.get("none", 5, 7) == b""


def test_a_put_tells_what_head_tells(store: Store) -> None:
    told = store.put("a", b"one")
    assert told.size == 3
    assert store.head("a") == told


def test_a_put_replaces_and_changes_the_tag(store: Store) -> None:
    first = store.put("a", b"one")
    second = store.put("a", b"two")
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


def test_over_replaces_only_the_object_of_that_tag(store: Store) -> None:
    first = store.put("LATEST", b"one")
    second = store.put("LATEST", b"two", over=first.tag)
    assert store.head("LATEST") == second
    with pytest.raises(PreconditionFailed, match="LATEST"):
        store.put("LATEST", b"three", over=first.tag)
    assert store.get("LATEST") == b"two"


def test_over_refuses_a_key_that_holds_nothing(store: Store) -> None:
    tag = store.put("a", b"x").tag
    store.delete(["a"])
    with pytest.raises(PreconditionFailed, match="a"):
        store.put("a", b"y", over=tag)
    assert list(store.list()) == []


def test_one_of_many_creators_wins(store: Store) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            store.put("only", str(number).encode(), create=True)
            won.append(number)
        except AlreadyExists:
            pass

    at_once(6, create)
    assert store.get("only") in [str(number).encode() for number in won]
    assert len(won) == 1 or not store.conditional


def test_one_of_many_successors_wins(store: Store) -> None:
    before = store.put("LATEST", b"before").tag
    won: list[int] = []

    def replace(number: int) -> None:
        try:
            store.put("LATEST", str(number).encode(), over=before)
            won.append(number)
        except PreconditionFailed:
            pass

    at_once(6, replace)
    assert store.get("LATEST") in [str(number).encode() for number in won]
    assert len(won) == 1 or not store.conditional


def test_a_reader_sees_the_old_or_the_new_object_but_never_a_mixture(store: Store) -> None:
    old, new = b"o" * 100_000, b"n" * 150_000
    store.put("a", old)
    done = threading.Event()

    def write() -> None:
        try:
            for turn in range(20):
                store.put("a", (new, old)[turn % 2])
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(store.get("a", 0, 200_000))
    writer.join()
    assert seen <= {old, new}


def test_a_missing_object_is_not_found_by_name(store: Store) -> None:
    for call in (store.get, store.head, lambda key: store.get(key, 3, 3), lambda key: store.get(key, 3, 5)):
        with pytest.raises(NotFound, match="no/such"):
            call("no/such")
    store.put("no/other", b"x")
    for call in (store.get, store.head):
        with pytest.raises(NotFound, match="no/such"):
            call("no/such")
        with pytest.raises(NotFound):
            call("no")


def test_an_object_is_found_by_the_content_id_that_its_writer_was_told(store: Store) -> None:
    told = store.put("shard", b"0123456789")
    known = None if told.content is None else Content(told.content, told.size)
    assert store.get("shard", content=known) == b"0123456789"
    assert store.get("shard", 2, 5, content=known) == b"234"
    assert store.head("shard").content == told.content


def test_the_uri_names_the_store(store: Store) -> None:
    store.put("a", b"x")
    with pytest.raises(NotFound, match=re.escape(f"{store.uri}/b")):
        store.get("b")


def test_keys_are_listed_sorted_below_a_prefix(store: Store) -> None:
    assert list(store.list()) == []
    for key in ("b/2", "b/10", "a", "b/1", "bc/1", "c/d/e"):
        store.put(key, b"x")
    assert list(store.list()) == ["a", "b/1", "b/10", "b/2", "bc/1", "c/d/e"]
    assert list(store.list("b/")) == ["b/1", "b/10", "b/2"]
    assert list(store.list("b")) == ["b/1", "b/10", "b/2", "bc/1"]
    assert list(store.list("b/1")) == ["b/1", "b/10"]
    assert list(store.list("nothing/here")) == []


def test_objects_are_dated_by_the_store(store: Store) -> None:
    assert isinstance(store, Dated)
    before = time.time()
    for key in ("a", "deep/b", "deep/er/c"):
        store.put(key, b"x")
    found = store.modified(["a", "deep/er/c", "deep/missing", "missing"])
    assert set(found) == {"a", "deep/er/c"}
    assert all(abs(written - before) < 60 for written in found.values())  # some stores tell whole seconds
    assert store.modified([]) == {}


def test_deleted_objects_are_gone_and_missing_ones_passed_over(store: Store) -> None:
    for key in ("a", "b", "c/d"):
        store.put(key, b"x")
    store.delete(iter(["never", "a", "c/never", "c/d"]))
    assert list(store.list()) == ["b"]
    store.delete([])
    assert list(store.list()) == ["b"]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a b", "a\\b", "a\n", "ä", "a" * 513])
def test_a_key_that_breaks_the_rule_is_refused(store: Store, key: str) -> None:
    for call in (store.get, store.head, lambda key: store.put(key, b"x"), lambda key: store.delete(["fine", key])):
        with pytest.raises(MalformedObject):
            call(key)
    assert list(store.list()) == []
