"""What the Hub's refusals mean, and whom its token may go to."""

from __future__ import annotations

import pytest

from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.store.hf import next_page
from vllm_delta_sync.store.hub import Answer, Hub, refusal, same_origin, wait_s


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
