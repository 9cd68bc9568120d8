"""What a failed transfer means, and which settings of hf_xet are the user's."""

from __future__ import annotations

import threading

import hf_xet
import pytest

from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.store import xet, xet_session
from vllm_delta_sync.store.deadline import call_within
from vllm_delta_sync.store.hub import Hub
from vllm_delta_sync.store.leaves import Leave
from vllm_delta_sync.store.protocol import Content
from vllm_delta_sync.store.xet_session import SETTINGS, failed, settings

_ANSWERED = "Network error: Request error: HTTP status client error ({}), domain: http://cas/v2/reconstructions/ab"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ConnectionError(_ANSWERED.format("404 Not Found")), NotFound),
        (ConnectionError(_ANSWERED.format("401 Unauthorized")), Unauthorized),
        (ConnectionError(_ANSWERED.format("403 Forbidden")), Unauthorized),
        (ConnectionError(_ANSWERED.format("429 Too Many Requests")), RateLimited),
        (ConnectionError("Network error: error sending request"), Unavailable),
        (PermissionError("authentication failed"), Unauthorized),
        (FileNotFoundError("no such object"), NotFound),
        (RuntimeError("Data sender was dropped before sending data."), Unavailable),
        (ValueError("anything else"), Unavailable),
    ],
)
def test_each_failure_of_the_client_is_a_typed_error(raised: Exception, kind: type[StoreError]) -> None:
    error = failed(raised, "reading hf://buckets/me/b/x")
    assert type(error) is kind
    assert "reading hf://buckets/me/b/x" in str(error) and str(raised) in str(error)


def test_a_signed_url_is_not_repeated() -> None:
    url = "https://transfer.example/xorbs/ab?Expires=1&Signature=hunter2&Key-Pair-Id=K"
    message = str(failed(ConnectionError(f"HTTP status client error (403 Forbidden) for url ({url})"), "reading"))
    assert "transfer.example/xorbs/ab" in message and "hunter2" not in message


def test_an_error_of_the_hub_itself_stays_what_it_is() -> None:
    refused = RateLimited("the Hub asks to wait", 17)
    assert failed(refused, "reading") is refused


def test_the_users_settings_stand() -> None:
    assert settings({}.get) == SETTINGS
    chosen = settings({"HF_XET_CLIENT_READ_TIMEOUT": "5s"}.get)
    assert SETTINGS.keys() - chosen.keys() == {"client.read_timeout"}


def test_every_setting_is_one_that_the_client_knows() -> None:
    from hf_xet import XetConfig

    assert SETTINGS.keys() <= set(XetConfig().keys())
    XetConfig().with_config(SETTINGS)


def test_who_waits_for_a_session_that_never_comes_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    began, over = threading.Event(), threading.Event()
    made = hf_xet.XetSession

    def hang(**_: object) -> None:
        monkeypatch.setattr(hf_xet, "XetSession", made)  # the next one is made
        began.set()
        over.wait(60)

    monkeypatch.setattr(xet_session, "_sessions", {})
    monkeypatch.setattr(hf_xet, "XetSession", hang)
    first = threading.Thread(target=xet_session.session)
    first.start()
    assert began.wait(10)
    found = call_within(10.0, "making a session", xet_session.session)
    over.set()
    first.join()
    assert isinstance(found, made) and xet_session.session() is found


def test_who_gives_up_on_a_group_that_never_comes_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Hanging:
        def new_download_stream_group(self, **_: object) -> None:
            over.wait(60)

    monkeypatch.setattr(xet, "leave", lambda *_: Leave("http://cas", "token", 0))
    monkeypatch.setattr(xet, "session", Hanging)
    transfers = xet.XetTransfers(Hub("http://hub", 0.1), "me/b", 0.1)
    transfers._downloads = xet._Downloads(0, Leave("http://cas", "old", 0), None)  # a parent's, before the fork
    try:
        with pytest.raises(Unavailable, match="reading x: no answer"):
            call_within(5.0, "waiting", lambda: transfers.download(Content("ab", 1), 0, 1, "reading x"))
    finally:
        over.set()
