"""Whatever the Hub or its client does, a call ends in bounded time with what was asked for or a typed error."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hub_buckets import DATA, QUICK_S, bucket, content_of, hurried

from tests.hub.process import READER, WRITER, HubProcess
from vllm_delta_sync.errors import DigestMismatch, NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.log.fetch import verified
from vllm_delta_sync.store import open_store
from vllm_delta_sync.store.protocol import Content
from vllm_delta_sync.wire.manifest import Found

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

WRITE_FAULTS: list[tuple[str, str, dict[str, Any], type[StoreError]]] = [
    ("stall", "batch", {}, Unavailable),
    ("status", "batch", {"status": 500}, Unavailable),
    ("status", "batch", {"status": 403}, Unauthorized),
    ("lose", "batch", {}, Unavailable),
    ("stall", "put_xorb", {}, Unavailable),
    ("status", "put_xorb", {"status": 401}, Unauthorized),
    ("status", "put_shard", {"status": 500}, Unavailable),
]


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
