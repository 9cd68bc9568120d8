"""What the Hub's refusals mean, and whom its token may go to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.store.fake_server import Answer as Said
from tests.unit.store.fake_server import FakeServer
from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.store.hf import HfStore, next_page
from vllm_delta_sync.store.hub import LONGEST_LINE, Answer, Hub, lines_of, refusal, same_origin, wait_s


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StoreError),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, NotFound),
        (408, Unavailable),
        (410, NotFound),
        (422, StoreError),
        (429, RateLimited),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
def test_each_status_is_an_error_of_its_kind_that_says_what_and_why(status: int, kind: type[StoreError]) -> None:
    error = refusal(Answer(status, {"x-error-message": "because"}, b"{}"), "reading hf://buckets/me/b/LATEST")
    assert type(error) is kind
    assert "reading hf://buckets/me/b/LATEST" in str(error) and "because" in str(error) and str(status) in str(error)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"ratelimit": '"api";r=0;t=55'}, 55),
        ({"ratelimit": '"resolver"; r=0; t=7', "retry-after": "30"}, 7),
        ({"ratelimit": '"api";r=12;t=55', "retry-after": "30"}, 30),  # that quota is not the reason
        ({"retry-after": " 120 "}, 120),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 60),
        ({"retry-after": "999999"}, 3600),
        ({"ratelimit": "nonsense"}, 60),
        ({}, 60),
    ],
)
def test_a_refusal_by_quota_says_how_long_to_wait(headers: dict[str, str], seconds: float) -> None:
    assert wait_s(headers) == seconds
    refused = refusal(Answer(429, headers, b""), "x")
    assert isinstance(refused, RateLimited) and refused.retry_after == seconds


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("https://hub.example/api/x", True),
        ("http://hub.example/api/x", False),
        ("https://hub.example:444/api/x", False),
        ("https://hub.example.evil/api/x", False),
        ("https://hub.example@evil/api/x", False),
    ],
)
def test_the_token_goes_to_the_hub_alone(url: str, same: bool) -> None:
    assert same_origin(url, "https://hub.example") is same


def test_an_endpoint_behind_a_proxy_may_have_a_path_of_its_own() -> None:
    asked: list[str] = []

    class Listening(Hub):
        def _send(self, what: str, method: str, url: str, body: bytes | None, kind: str) -> Answer:
            asked.append(url)
            return Answer(200, {}, b"{}")

    Listening("https://proxy.example/hf/", 10).ask("asking", "GET", "/api/buckets/me/b")
    Listening("https://proxy.example/hf", 10).ask("asking", "GET", "https://proxy.example/hf/api?next=a")
    assert asked == ["https://proxy.example/hf/api/buckets/me/b", "https://proxy.example/hf/api?next=a"]


def test_a_next_page_is_followed_on_the_hub_only() -> None:
    def after(link: str) -> str | None:
        return next_page(Answer(200, {"link": link}, b"[]"), "https://hub.example")

    assert after('<https://hub.example/t?cursor=a>; rel="next"') == "https://hub.example/t?cursor=a"
    assert after('</t?cursor=a>; rel="next"') == "https://hub.example/t?cursor=a"
    assert after('<https://hub.example/t>; rel="prev"') is None
    assert after("") is None
    with pytest.raises(StoreError, match="not the Hub"):
        after('<https://evil.example/t>; rel="next"')


def test_a_list_without_end_is_given_up() -> None:
    class Endless(Hub):
        def _send(self, what: str, method: str, url: str, body: bytes | None, kind: str) -> Answer:
            return Answer(200, {"link": '</tree?cursor=a>; rel="next"'}, json.dumps([]).encode())

    store = HfStore("me/bucket", Endless("https://hub.example", 0.02), 0.02)
    with pytest.raises(Unavailable, match=r"the list does not end within 0\.2 s"):
        store.list()


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_json_is_none_of_a_hub(body: bytes) -> None:
    with pytest.raises(Unavailable, match="is not JSON"):
        Answer(200, {}, body).json("asking")


def test_a_file_that_the_hub_does_not_date_is_left_out() -> None:
    class Undated(Hub):
        def _send(self, what: str, method: str, url: str, body: bytes | None, kind: str) -> Answer:
            rows = [{"type": "file", "path": name, **dated} for name, dated in found.items()]
            return Answer(200, {}, json.dumps(rows).encode())

    found = {"a": {"uploadedAt": "1970-01-01T00:00:01Z"}, "b": {}, "c": {"uploadedAt": "?"}}
    assert HfStore("me/bucket", Undated("https://hub.example", 10), 10).modified(list(found)) == {"a": 1.0}


def test_an_answer_that_comes_byte_by_byte_for_ever_holds_no_thread() -> None:
    server = FakeServer()
    server.answer = Said(body=b"x" * 1000, drip_s=0.05)
    before = threading.active_count()
    try:
        with pytest.raises(Unavailable):
            Hub(server.url, 1.0).ask("asking", "GET", "/api")
        end = time.monotonic() + 10
        while any(thread.name == "store-call" for thread in threading.enumerate()):
            assert time.monotonic() < end, "a thread goes on reading"
            time.sleep(0.05)
    finally:
        server.close()
    assert threading.active_count() <= before + 2  # the server's own


def test_lines_come_as_they_end_whatever_they_come_in() -> None:
    chunks = [b"da", b"ta: 1\r\n\n: pi", b"ng\nhalf \xff"]
    assert list(lines_of(chunks, "following")) == ["data: 1", "", ": ping"]


def test_a_line_without_end_is_refused_before_it_is_held() -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1 << 16
            yield b"x" * (1 << 16)

    with pytest.raises(Unavailable, match="a line has more than"):
        list(lines_of(endless(), "following"))
    assert taken <= LONGEST_LINE + (1 << 16)
