"""Objects too large for one request, on an S3 server: in parts, of which few are in memory at a time."""

from __future__ import annotations

import os
from typing import Any

import pytest
import servers

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.store import objects, open_store

PART = 5 << 20  # the least that S3 takes, but for the last


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "WHOLE", PART)
    monkeypatch.setattr(objects, "LARGEST_REQUEST", 2 * PART)
    monkeypatch.setattr(objects, "_PIECE", PART)


@pytest.mark.usefixtures("small_limits")
def test_an_object_larger_than_a_request_goes_up_in_parts(running: Any) -> None:
    store = open_store(servers.new_bucket(running.endpoint("moto")))
    data = os.urandom(2 * PART + 1000)
    told = store.put("anchors/a", data)
    assert told.tag.strip('"').endswith("-3"), "the ETag of three parts"
    assert store.head("anchors/a") == told
    assert store.get("anchors/a") == data
    assert store.put("anchors/a", data[:PART]).tag.count("-") == 0, "one request does for so few"
    with pytest.raises(ConfigError, match="under a condition"):
        store.put("b", data, create=True)


@pytest.mark.usefixtures("small_limits")
def test_there_are_never_more_parts_than_a_store_takes(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_MOST_PARTS", 2)
    store = open_store(servers.new_bucket(running.endpoint("moto")))
    data = os.urandom(2 * PART + 1000)
    assert store.put("a", data).tag.strip('"').endswith("-2")
    assert store.get("a") == data
