"""Hugging Face buckets through the real client against the stand-in Hub: what is asked of it, and what comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from hub_buckets import DATA, bucket

from tests.hub.process import HubProcess
from vllm_delta_sync.errors import NotFound, Unavailable
from vllm_delta_sync.store import open_store
from vllm_delta_sync.store.protocol import Content
from vllm_delta_sync.store.watch import Watchable


def test_with_a_content_id_the_hub_is_asked_for_nothing_but_one_token(hub: HubProcess) -> None:
    store = bucket()
    told = store.put("a", DATA)
    assert told.content is not None
    reader = open_store(store.uri)
    hub.control(forget_counts=True)
    for start in range(10):
        assert reader.get("a", start, 50_000, content=Content(told.content, told.size)) == DATA[start:50_000]
    for _ in range(3):  # nor does it matter how often the store is opened
        assert open_store(store.uri).get("a", content=Content(told.content, told.size)) == DATA
    counts = hub.counts()
    assert (counts.get("api", 0), counts.get("token"), counts.get("resolver", 0)) == (1, 1, 0)


def test_an_id_that_leads_nowhere_is_a_hint_no_more(hub: HubProcess) -> None:
    store = bucket()
    store.put("a", DATA)
    assert store.get("a", content=Content("e" * 64, 10)) == DATA
    assert store.get("a", content=Content("another-store's-id", 10)) == DATA
    with pytest.raises(NotFound, match="/gone"):
        store.get("gone", content=Content("e" * 64, 10))


def test_an_id_that_leads_to_fewer_bytes_than_stated_is_a_hint_no_more(hub: HubProcess) -> None:
    store = bucket()
    store.put("a", DATA)
    shorter = store.put("b", DATA[:1000])
    assert shorter.content is not None
    wrong = Content(shorter.content, len(DATA))
    assert store.get("a", content=wrong) == DATA
    assert store.get("a", 500, 2000, content=wrong) == DATA[500:2000]
    assert store.get("a", 5000, 6000, content=wrong) == DATA[5000:6000]


def test_the_first_write_creates_a_private_bucket_and_the_hubs_own_client_reads_it(hub: HubProcess) -> None:
    from huggingface_hub import HfApi

    store = bucket()
    identity = store.uri.removeprefix("hf://buckets/")
    store.put("deep/a", DATA)
    api = HfApi(endpoint=hub.url)
    assert api.bucket_info(identity).private
    assert [(file.path, file.size) for file in api.list_bucket_tree(identity, recursive=True)] == [("deep/a", 70_000)]
    assert api.get_bucket_file_metadata(identity, "deep/a").xet_file_data.file_hash == store.head("deep/a").tag


def test_objects_are_dated_by_the_hub(hub: HubProcess) -> None:
    store = bucket()
    before = time.time() - 1
    store.put("a", DATA)
    assert before < store.modified(["a", "missing"])["a"] < time.time() + 1
    assert store.modified(["missing"]) == {}


def test_a_batch_of_which_a_part_is_lost_is_a_failure_that_names_what_is_left(hub: HubProcess) -> None:
    store = bucket()
    for key in ("a", "b", "c"):
        store.put(key, key.encode())
    hub.fault("lose", "batch", path="b")
    with pytest.raises(Unavailable, match="1 objects are left, the first is b"):
        store.delete(["a", "b", "c", "never"])
    assert list(store.list()) == ["b"]


def test_objects_that_are_put_together_take_one_request(hub: HubProcess) -> None:
    store = bucket()
    store.put("first", b"")
    hub.control(forget_counts=True)
    with store.batch() as batch:
        for name in "abc":
            batch.put(name, name.encode())
    assert (hub.counts()["api"], hub.counts()["batch"], hub.counts().get("resolver", 0)) == (1, 1, 0)
    assert [*store.list()] == ["a", "b", "c", "first"]


def test_of_a_batch_that_is_given_up_nothing_is_named_and_of_one_that_fails_it_is_said_what(hub: HubProcess) -> None:
    store = bucket()
    with pytest.raises(KeyError), store.batch() as batch:
        batch.put("a", b"a")
        raise KeyError
    assert [*store.list()] == []
    hub.fault("lose", "batch", path="b")
    with pytest.raises(Unavailable, match="did not take b: Internal error"), store.batch() as batch:
        batch.put("a", b"a")
        batch.put("b", b"b")


def test_the_first_batch_creates_the_bucket(hub: HubProcess) -> None:
    store = bucket()
    with store.batch() as batch:
        batch.put("a", b"a")
    assert store.get("a") == b"a"


def test_the_feed_tells_of_the_one_object_and_ends_when_told(hub: HubProcess) -> None:
    store = bucket()
    store.put("LATEST", b"0")
    assert isinstance(store, Watchable)
    stop, told = threading.Event(), threading.Semaphore(0)

    def watch() -> None:
        for _ in store.changes("LATEST", stop):
            told.release()

    thread = threading.Thread(target=watch)
    thread.start()
    assert told.acquire(timeout=10)  # at once: what happened before nobody tells
    store.put("versions/1", b"1")
    store.put("LATEST", b"1")
    assert told.acquire(timeout=10)
    assert not told.acquire(timeout=0.5)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("status", [401, 403, 404, 501])
def test_where_there_is_no_feed_it_ends_at_once(hub: HubProcess, status: int) -> None:
    store = bucket()
    store.put("LATEST", b"0")
    hub.fault("status", "events", status=status, times=None)
    assert list(store.changes("LATEST", threading.Event())) == []
    assert hub.counts()["events"] == 1


def test_a_feed_that_breaks_is_taken_up_again(hub: HubProcess) -> None:
    store = bucket()
    store.put("LATEST", b"0")
    hub.fault("status", "events", status=500)
    stop = threading.Event()
    feed = store.changes("LATEST", stop)
    next(feed)
    assert hub.counts()["events"] == 2
    store.put("LATEST", b"1")
    next(feed)
    assert hub.counts()["events"] == 2
    stop.set()
    assert list(feed) == []


_TOGETHER = """
import os, sys
from vllm_delta_sync.store import open_store
import vllm_delta_sync.store.hf
assert not {"huggingface_hub", "hf_xet", "httpx", "httpx2"} & sys.modules.keys(), "imported before it is needed"
store, name = open_store(sys.argv[1]), sys.argv[2]
for turn in range(3):
    store.put(f"{name}/{turn}", name.encode() * 20_000 + bytes([turn]))
    store.put("shared", name.encode() * 20_000)
    assert store.get("shared") in {other.encode() * 20_000 for other in "abc"}
child = os.fork()
if child == 0:
    good = store.get(f"{name}/2") == name.encode() * 20_000 + bytes([2])
    store.put(f"{name}/forked", b"forked")
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0, "the forked process"
assert store.get(f"{name}/forked") == b"forked"
"""


def test_several_processes_and_their_forks_use_one_bucket_at_once(hub: HubProcess) -> None:
    store = bucket()
    store.put("begin", b"")
    command = [sys.executable, "-c", _TOGETHER, store.uri]
    together = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "abc"]
    for process in together:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    expected = [f"{name}/{what}" for name in "abc" for what in ("0", "1", "2", "forked")]
    assert [key for key in store.list() if "/" in key] == expected
