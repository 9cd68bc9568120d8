"""Object stores when the server refuses, fails, stalls or lies; what settings and environment come to."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.store.fake_server import Answer, FakeServer
from vllm_delta_sync.config import AzStoreConfig, GsStoreConfig, S3StoreConfig, StoreConfig
from vllm_delta_sync.errors import (
    AlreadyExists,
    ConfigError,
    DeltaSyncError,
    NotFound,
    PreconditionFailed,
    RateLimited,
    StoreError,
    Unauthorized,
    Unavailable,
)
from vllm_delta_sync.store import Store, objects, open_store

PATIENT_S = 3.0  # of one call that is answered, also by a busy machine
QUICK_S = 0.5  # of one that is not


@pytest.fixture
def server() -> Iterator[FakeServer]:
    running = FakeServer()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-shown")


def s3(endpoint: str, **settings: Any) -> S3StoreConfig:
    return S3StoreConfig(bucket="bucket", endpoint_url=endpoint, region="eu-central-1", **settings)


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("k", 0, 10),
    "head": lambda store: store.head("k"),
    "put": lambda store: store.put("k", b"data"),
    "create": lambda store: store.put("k", b"data", create=True),
    "over": lambda store: store.put("k", b"data", over='"1"'),
    "list": lambda store: list(store.list("k")),
    "delete": lambda store: store.delete(["k"]),
}


REFUSALS: list[tuple[int, bytes, type[DeltaSyncError], tuple[str, ...]]] = [
    (401, b"", Unauthorized, ("get", "over", "list")),
    (403, b"<Error><Code>AccessDenied</Code></Error>", Unauthorized, ("get", "over", "list", "delete")),
    (400, b"<Error><Code>ExpiredToken</Code></Error>", Unauthorized, ("get", "over", "list")),
    (400, b"<Error><Code>InvalidRequest</Code></Error>", StoreError, ("get", "over", "list")),
    # These are tried again first, which takes its time.
    (429, b"", RateLimited, ("over",)),
    (503, b"<Error><Code>SlowDown</Code></Error>", RateLimited, ("list",)),
    (500, b"", Unavailable, ("get",)),
    (502, b"", Unavailable, ("create",)),
]


@pytest.mark.parametrize(
    ("status", "body", "kind", "call"),
    [(status, body, kind, call) for status, body, kind, calls in REFUSALS for call in calls],
)
def test_a_refusal_is_a_typed_error_that_names_store_and_reason(
    server: FakeServer, status: int, body: bytes, kind: type[DeltaSyncError], call: str
) -> None:
    server.answer = Answer(status, body)
    with pytest.raises(StoreError, match=rf"s3://bucket.*{status}") as caught:
        CALLS[call](open_store(s3(server.url), timeout_s=PATIENT_S))
    assert type(caught.value) is kind
    assert "never-shown" not in str(caught.value)
    assert "Debug" not in str(caught.value)


def test_a_store_that_asks_to_slow_down_says_for_how_long(server: FakeServer) -> None:
    server.answer = Answer(503, b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(RateLimited) as caught:
        open_store(s3(server.url), timeout_s=PATIENT_S).head("k")
    assert caught.value.retry_after >= 1


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_accepts_and_never_answers_is_unavailable_in_time(call: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = open_store(s3(f"http://127.0.0.1:{listener.getsockname()[1]}"), timeout_s=QUICK_S)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="s3://bucket"):
            CALLS[call](store)
        assert time.monotonic() - began < 5


def test_a_server_that_is_not_there_is_unavailable_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(Unavailable, match="s3://bucket/k"):
        open_store(s3(f"http://127.0.0.1:{port}"), timeout_s=QUICK_S).head("k")
    assert time.monotonic() - began < 5


def test_a_body_that_ends_early_is_unavailable_and_never_a_short_read(server: FakeServer) -> None:
    headers = {"ETag": '"1"', "Content-Range": "bytes 0-9/100", "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"}
    server.answer = Answer(206, b"01234", headers, length=10)
    with pytest.raises(Unavailable, match="s3://bucket/k"):
        open_store(s3(server.url), timeout_s=QUICK_S).get("k", 0, 10)


def test_a_body_that_never_quite_stalls_is_given_up_in_time(server: FakeServer) -> None:
    headers = {"ETag": '"1"', "Content-Range": "bytes 0-29/30", "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"}
    server.answer = Answer(206, bytes(30), headers, drip_s=0.1)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="s3://bucket/k"):
        open_store(s3(server.url), timeout_s=QUICK_S).get("k", 0, 30)
    assert time.monotonic() - began < 2.5


def test_a_server_that_ignores_ranges_is_refused_before_its_body_is_read(server: FakeServer) -> None:
    server.answer = Answer(200, b"everything")
    with pytest.raises(StoreError, match="range"):
        open_store(s3(server.url), timeout_s=PATIENT_S).get("k", 2, 5)


@pytest.mark.parametrize(
    ("status", "call", "kind"),
    [(412, "create", AlreadyExists), (409, "create", AlreadyExists), (412, "over", PreconditionFailed)],
)
def test_a_condition_that_does_not_hold_is_told_apart(
    server: FakeServer, status: int, call: str, kind: type[StoreError]
) -> None:
    server.answer = Answer(status)
    with pytest.raises(kind, match="s3://bucket/k"):
        CALLS[call](open_store(s3(server.url), timeout_s=PATIENT_S))


def test_a_clock_too_wrong_to_sign_by_is_named(server: FakeServer) -> None:
    server.answer = Answer(403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
    with pytest.raises(Unauthorized, match="s3://bucket/k: this machine's clock"):
        open_store(s3(server.url), timeout_s=PATIENT_S).get("k", 0, 10)


def test_a_missing_bucket_is_said_to_be_one(server: FakeServer) -> None:
    server.answer = Answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
    with pytest.raises(NotFound, match="bucket does not exist"):
        open_store(s3(server.url), timeout_s=PATIENT_S).get("k", 0, 10)


def test_a_foreign_object_that_cannot_be_listed_is_named(server: FakeServer) -> None:
    entry = (
        "<Key>a//b</Key><LastModified>2026-11-30T10:00:00.000Z</LastModified><ETag>1</ETag><Size>1</Size>"
        "<StorageClass>STANDARD</StorageClass>"
    )
    listing = f"<ListBucketResult><IsTruncated>false</IsTruncated><Contents>{entry}</Contents></ListBucketResult>"
    server.answer = Answer(200, listing.encode())
    with pytest.raises(StoreError, match=r"none of a log's.*a//b") as caught:
        list(open_store(s3(server.url), timeout_s=PATIENT_S).list())
    assert type(caught.value) is StoreError


def test_conditions_are_sent_only_to_a_server_that_honours_them(server: FakeServer) -> None:
    CALLS["over"](open_store(s3(server.url), timeout_s=PATIENT_S))
    assert [headers.get("if-match") for _, _, headers in server.requests] == ['"1"']
    server.requests.clear()
    server.answer.headers["Last-Modified"] = "Mon, 30 Nov 2026 10:00:00 GMT"
    plain = open_store(s3(server.url, conditional_writes=False), timeout_s=PATIENT_S)
    assert not plain.conditional
    CALLS["over"](plain)
    assert [(method, headers.get("if-match")) for method, _, headers in server.requests] == [
        ("HEAD", None),
        ("PUT", None),
    ]
    with pytest.raises(AlreadyExists):
        CALLS["create"](plain)
    with pytest.raises(PreconditionFailed):
        plain.put("k", b"data", over='"2"')


def test_region_and_credentials_sign_each_request_unless_it_is_anonymous(server: FakeServer) -> None:
    open_store(s3(server.url), timeout_s=PATIENT_S).put("k", b"x")
    open_store(s3(server.url, anonymous=True), timeout_s=PATIENT_S).put("k", b"x")
    signed, unsigned = (headers.get("authorization") for _, _, headers in server.requests)
    assert signed is not None and "Credential=id/" in signed and "/eu-central-1/s3/" in signed
    assert unsigned is None


def test_a_uri_alone_takes_endpoint_and_region_from_the_environment(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "mars-1")
    open_store("s3://bucket/run", timeout_s=PATIENT_S).put("k", b"x")
    ((method, path, headers),) = server.requests
    assert (method, path) == ("PUT", "/bucket/run/k")
    assert "/mars-1/s3/" in headers["authorization"]


def test_without_credentials_the_variables_are_pointed_out(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    server.answer = Answer(404)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
    with pytest.raises(Unauthorized, match=r"no credentials.*docs/operations\.md"):
        open_store(s3(server.url), timeout_s=PATIENT_S).head("k")


def test_google_conditions_are_on_generations(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    account = tmp_path / "account.json"
    account.write_text(
        f'{{"gcs_base_url": "{server.url}", "disable_oauth": true, "client_email": "", "private_key": "", '
        '"private_key_id": ""}'
    )
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)  # allows http://
    server.answer = Answer(headers={"ETag": '"same"', "x-goog-generation": "17"})
    store = open_store(GsStoreConfig(bucket="bucket"), timeout_s=PATIENT_S)
    assert store.conditional
    assert store.put("k", b"x", over="16").tag == "17"
    assert server.requests[-1][2]["x-goog-if-generation-match"] == "16"


class InParts(FakeServer):
    """Takes uploads in parts, at whose end it does not tell the generation that it tells to a HEAD."""

    @property
    def answer(self) -> Answer:
        if self.requests[-1][0] == "HEAD":
            dated = {"ETag": '"e"', "x-goog-generation": "18", "Last-Modified": "Mon, 30 Nov 2026 12:00:00 GMT"}
            return Answer(headers=dated, length=7)
        return Answer(body=b'<Upload><UploadId>u</UploadId><ETag>"e"</ETag></Upload>')

    @answer.setter
    def answer(self, answer: Answer) -> None:
        """It says what it says."""


def test_an_upload_in_parts_that_ends_without_a_tag_has_it_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = InParts()
    account = {"gcs_base_url": parts.url, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("AWS_ENDPOINT_URL", parts.url)  # allows http://
    monkeypatch.setattr(objects, "WHOLE", 4)
    try:
        store = open_store(GsStoreConfig(bucket="bucket"), timeout_s=PATIENT_S)
        assert store.put("k", b"7 bytes").tag == "18"
        assert [method for method, _, _ in parts.requests] == ["POST", "PUT", "POST", "HEAD"]
    finally:
        parts.close()


def test_azure_asks_for_an_account_and_sends_conditions(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"az://container.*[Aa]ccount"):
        open_store("az://container")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=1&sig=never-shown")
    store = open_store(
        AzStoreConfig(container="container", account="account", endpoint_url=server.url), timeout_s=PATIENT_S
    )
    assert store.put("k", b"x", over='"1"').tag == '"1"'
    assert server.requests[-1][2]["if-match"] == '"1"'
    server.answer = Answer(403)
    with pytest.raises(Unauthorized) as caught:
        list(store.list())
    assert "never-shown" not in str(caught.value)


def test_a_process_that_was_forked_after_use_is_told_so_at_once() -> None:
    script = """
import os
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.store import open_store
open_store("memory://a").put("k", b"x")
if os.fork() == 0:
    for call in (lambda: open_store("memory://a").get("k"), lambda: open_store("memory://a").list()):
        try:
            call()
            os._exit(1)
        except StoreError as error:
            assert "forked" in str(error)
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 7


def test_without_obstore_the_extra_is_named() -> None:
    script = """
import sys
sys.modules["obstore"] = None  # as if it were not installed
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.store import open_store
try:
    open_store("s3://bucket")
except ConfigError as error:
    raise SystemExit(7 if "vllm-delta-sync[object-store]" in str(error) else str(error))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 7


@pytest.mark.parametrize(
    "config", [s3("http://127.0.0.1:9"), GsStoreConfig(bucket="bucket"), AzStoreConfig(container="can", account="acc")]
)
def test_opening_asks_no_server(config: StoreConfig) -> None:
    store = open_store(config)
    assert store.uri == config.uri
    assert (store.conditional, store.metered) == (True, False)


def test_more_than_one_request_takes_cannot_be_written_under_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LARGEST_REQUEST", 100)
    store = open_store("memory://conditions")
    tag = store.put("k", b"x" * 100, create=True).tag
    for condition in ({"create": True}, {"over": tag}):
        with pytest.raises(ConfigError, match=r"memory://conditions/k: 101 bytes; at most 100 .* under a condition"):
            store.put("k", b"x" * 101, **condition)  # type: ignore[arg-type]
    store.put("k", b"y" * 101)
    assert store.get("k") == b"y" * 101
