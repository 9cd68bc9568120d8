"""Hugging Face buckets: the real client against the stand-in Hub, with everything that goes wrong between them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.hub.process import READER, WRITER, HubProcess
from vllm_delta_sync.config import HfStoreConfig
from vllm_delta_sync.errors import DigestMismatch, NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.log.fetch import verified
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.store.hf import HfStore
from vllm_delta_sync.store.protocol import Content
from vllm_delta_sync.store.watch import Watchable
from vllm_delta_sync.wire.manifest import Found

DATA = os.urandom(70_000)  # no compressible byte: a wrong one comes through where nobody verifies
QUICK_S, PATIENT_S = 2.0, 20.0


_numbers = iter(range(1_000_000))


def bucket(timeout_s: float = PATIENT_S) -> HfStore:
    """A store on a bucket of its own."""
    store = open_store(HfStoreConfig(bucket=f"tests/hf-{next(_numbers)}"), timeout_s=timeout_s)
    assert isinstance(store, HfStore)
    return store


def hurried(store: Store) -> Store:
    """The same bucket by someone who waits for two seconds only."""
    return open_store(store.uri, timeout_s=QUICK_S)


def content_of(store: Store, key: str) -> Content:
    info = store.head(key)
    assert info.content is not None
    return Content(info.content, info.size)


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


def test_who_may_read_only_may_not_write(hub: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bucket()
    store.put("a", DATA)
    monkeypatch.setenv("HF_TOKEN", READER)
    reader = open_store(store.uri)
    assert reader.get("a") == DATA
    with pytest.raises(Unauthorized, match="HF_TOKEN"):
        reader.put("a", b"x")
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    with pytest.raises(Unauthorized, match="HF_TOKEN"):
        open_store(store.uri).get("a")


def test_a_token_revoked_in_between_is_named_and_a_new_right_heals(hub: HubProcess) -> None:
    store = bucket()
    store.put("a", DATA)
    content = content_of(store, "a")
    assert store.get("a", content=content) == DATA
    hub.control(rights={WRITER: "none"})
    reads: list[Callable[[], object]] = [lambda: store.get("a", content=content), lambda: store.head("a")]
    for call in [*reads, lambda: store.put("a", b"x"), lambda: list(store.list()), lambda: store.delete(["a"])]:
        with pytest.raises(Unauthorized):
            call()
    hub.heal()
    assert store.get("a", content=content) == DATA


def test_leave_that_ends_before_its_time_is_asked_for_again(hub: HubProcess) -> None:
    store = bucket()
    store.put("a", DATA)
    content = content_of(store, "a")
    assert store.get("a", content=content) == DATA
    hub.control(end_xet_tokens=True)
    assert store.get("a", content=content) == DATA
    store.put("a", DATA[::-1])
    assert store.get("a") == DATA[::-1]


FAULTS: list[tuple[str, str, dict[str, Any], type[StoreError]]] = [
    ("status", "resolve", {"status": 401}, Unauthorized),
    ("status", "resolve", {"status": 500}, Unavailable),
    ("stall", "resolve", {}, Unavailable),
    ("status", "token", {"status": 503}, Unavailable),
    ("stall", "token", {}, Unavailable),
    ("truncate", "token", {}, Unavailable),
    ("status", "reconstruction", {"status": 401}, Unauthorized),
    ("status", "reconstruction", {"status": 404}, NotFound),
    ("status", "reconstruction", {"status": 429}, RateLimited),
    ("stall", "reconstruction", {}, Unavailable),
    ("status", "fetch", {"status": 500}, Unavailable),
    ("truncate", "fetch", {}, Unavailable),
    ("stall_body", "fetch", {}, Unavailable),
]


@pytest.mark.parametrize(("kind", "on", "details", "error"), FAULTS, ids=lambda value: str(value))
def test_a_read_that_cannot_be_is_a_typed_error_in_bounded_time(
    hub: HubProcess, kind: str, on: str, details: dict[str, Any], error: type[StoreError]
) -> None:
    patient = bucket()
    patient.put("a", DATA)
    store = hurried(patient)
    hub.fault(kind, on, times=None, **details)
    begin = time.monotonic()
    with pytest.raises(error, match="hf://buckets/tests/") as caught:
        store.get("a")
    assert type(caught.value) is error
    assert time.monotonic() - begin < 3 * QUICK_S
    hub.heal()
    assert patient.get("a") == DATA


WRITE_FAULTS: list[tuple[str, str, dict[str, Any], type[StoreError]]] = [
    ("stall", "batch", {}, Unavailable),
    ("status", "batch", {"status": 500}, Unavailable),
    ("status", "batch", {"status": 403}, Unauthorized),
    ("lose", "batch", {}, Unavailable),
    ("stall", "put_xorb", {}, Unavailable),
    ("status", "put_xorb", {"status": 401}, Unauthorized),
    ("status", "put_shard", {"status": 500}, Unavailable),
]


@pytest.mark.parametrize(("kind", "on", "details", "error"), WRITE_FAULTS, ids=lambda value: str(value))
def test_a_write_that_cannot_be_leaves_what_was_there(
    hub: HubProcess, kind: str, on: str, details: dict[str, Any], error: type[StoreError]
) -> None:
    patient = bucket()
    patient.put("a", b"old")
    hub.fault(kind, on, times=None, **details)
    begin = time.monotonic()
    with pytest.raises(error, match="hf://buckets/tests/"):
        hurried(patient).put("a", os.urandom(70_000))
    assert time.monotonic() - begin < 3 * QUICK_S
    hub.heal()
    assert patient.get("a") == b"old"
    patient.put("a", DATA)
    assert patient.get("a") == DATA


@pytest.mark.parametrize("on", ["resolve", "token", "fetch", "reconstruction"])
def test_a_hub_that_stumbles_is_waited_for(hub: HubProcess, on: str) -> None:
    store = bucket()
    store.put("a", DATA)
    hub.fault("status", on, status=500, times=2)
    assert open_store(store.uri).get("a") == DATA


def test_a_quota_that_is_used_up_says_when_it_is_there_again(hub: HubProcess) -> None:
    store = bucket()
    store.put("a", DATA)
    content = content_of(store, "a")
    store.get("a", content=content)
    hub.control(quotas={"resolver": [2, 300]})
    store.head("a")
    store.head("a")
    with pytest.raises(RateLimited, match="asks to wait") as caught:
        store.head("a")
    assert 290 <= caught.value.retry_after <= 300
    assert store.get("a", content=content) == DATA  # which needs no quota


@pytest.mark.parametrize("kind", ["flip", "swap"])
def test_wrong_bytes_of_the_right_size_come_through_the_client_and_are_caught_by_their_digest(
    hub: HubProcess, kind: str
) -> None:
    store = bucket()
    told = store.put("a", DATA)
    ref = Found(key="a", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA), content=told.content)
    hub.fault(kind, "fetch", times=None)
    wrong = store.get("a", content=content_of(store, "a"))
    assert len(wrong) == len(DATA) and wrong != DATA
    with pytest.raises(DigestMismatch, match="/a"):
        verified(store, ref)
    hub.heal()
    assert verified(store, ref) == DATA


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


def test_a_list_that_breaks_off_is_not_taken_for_a_whole_one(hub: HubProcess) -> None:
    store = bucket()
    with store.batch() as batch:
        for number in range(7):  # pages of three
            batch.put(f"v/{number}", b"x")
    hub.fault("status", "tree_prefix", status=404, skip=1)
    with pytest.raises(Unavailable, match="broke off"):
        store.list("v/")
    hub.heal()
    assert len([*store.list("v/")]) == 7


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


def test_a_download_that_fails_harms_none_beside_it(hub: HubProcess) -> None:
    store = bucket()
    content = Content(store.put("a", DATA).tag, len(DATA))
    store.get("a", content=content)
    wrong: list[object] = []

    def read(number: int) -> None:
        for _ in range(5):
            try:
                if number % 2:
                    assert store.get("a", content=content) == DATA
                else:
                    store.get("missing", content=Content(f"{number + 1:064x}", 10))
                    wrong.append("missing was found")
            except NotFound as error:
                if number % 2:
                    wrong.append(error)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
