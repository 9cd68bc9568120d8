"""Timed requests to the Hugging Face Hub, and what its refusals mean.

Does not move file contents or know what is asked, except that asking twice must do no harm.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.store.deadline import call_within
from vllm_delta_sync.store.patience import retried

LARGEST_ANSWER = 16 << 20
"""Bytes of an answer that are read at most; a page of a listing has about 300 KB."""

AGAIN_S = 5.0
"""Seconds for which a request that fails is sent again: a Hub that stumbles is waited for, one that is down is told."""

LONGEST_LINE = 1 << 20
"""Bytes of a line of a stream that are read at most."""

XET_HASH = "x-xet-hash"
_REDIRECTS = 5
ONCE_S = 30.0
"""Seconds for one try at most, however patient the user is: no answer moves much."""

_DEFAULT_WAIT_S = 60.0
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the Hub said: status, headers by lower-case name, the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self, what: str) -> Any:
        """The body as JSON; raises Unavailable when it is none, as that of a proxy's page."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise no_hub(what, "the answer is not JSON") from None


class Hub:
    """One Hub as one user.

    Args:
        endpoint: root URL; None takes HF_ENDPOINT, or else https://huggingface.co.
        timeout_s: seconds for one request, all its tries together, at most; less where ONCE_S and AGAIN_S are.
    """

    def __init__(self, endpoint: str | None, timeout_s: float) -> None:
        from huggingface_hub import constants

        # From the environment as it is now: the client's constant is from when it was first imported.
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._again_s = min(AGAIN_S, timeout_s / 2)
        self._once_s = min(ONCE_S, timeout_s - self._again_s)

    def headers(self) -> dict[str, str]:
        """User agent, and authorization by HF_TOKEN or the token of `hf auth login`, whichever there is by now."""
        from huggingface_hub import __version__, constants, get_token

        # Not `build_hf_headers`: it asks the Hub for a list of agents, which counts against the quota, once a process.
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        agent = {"user-agent": f"vllm-delta-sync; hf_hub/{__version__}"}
        return {**agent, "authorization": f"Bearer {token}"} if token else agent

    def _url(self, path: str) -> str:
        # Not joined as links are: an endpoint behind a proxy may have a path of its own.
        return path if "://" in path.partition("?")[0] else self.endpoint + path

    def ask(
        self,
        what: str,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        kind: str = "application/json",
        passed: tuple[int, ...] = (),
    ) -> Answer:
        """Send a request whose repetition does no harm; again, for a few seconds, while the Hub fails.

        Args:
            what: what is done and where, for messages.
            method: of HTTP.
            path: below the endpoint, quoted; or a whole URL of the same origin.
            body: with `kind` as its content type.
            passed: statuses that are answers here, not refusals.

        Raises:
            NotFound, Unauthorized, RateLimited, Unavailable, StoreError: as `refusal` tells them apart; Unavailable
                also when there is no answer in time, or one larger than LARGEST_ANSWER.
        """

        def attempt() -> Answer | RateLimited:
            try:
                return self._follow(what, method, self._url(path), body, kind, passed)
            except RateLimited as refused:  # not waited for here: the caller knows what can wait
                return refused

        found = retried(self._again_s, attempt)
        if isinstance(found, RateLimited):
            raise found
        return found

    def _follow(
        self, what: str, method: str, url: str, body: bytes | None, kind: str, passed: tuple[int, ...]
    ) -> Answer:
        """One try, with its redirects."""
        for _ in range(_REDIRECTS):
            send = partial(self._send, what, method, url, body, kind)
            answer = call_within(self._once_s, f"{what} ({method} {url})", send)
            if answer.status >= 400 and answer.status not in passed:
                raise refusal(answer, what)
            target = urljoin(url, answer.headers.get("location", url))
            # What is asked of a file is on the redirect to its bytes already, and the token must not leave the Hub.
            there = target == url or XET_HASH in answer.headers or not same_origin(target, self.endpoint)
            if answer.status < 300 or there:
                return answer
            url = target
        raise Unavailable(f"{what}: more than {_REDIRECTS} redirects from {self.endpoint}")

    def _send(self, what: str, method: str, url: str, body: bytes | None, kind: str) -> Answer:
        headers = {**self.headers(), "Accept-Encoding": "identity"}
        end = time.monotonic() + self._once_s  # the client's own limit is on silence, which a byte now and then breaks
        if body is not None:
            headers["Content-Type"] = kind
        with self._open(what, method, url, headers, body, self._once_s) as response:
            read = bytearray()
            for chunk in response.iter_bytes():
                read += chunk
                if len(read) > LARGEST_ANSWER:
                    raise no_hub(what, f"the answer has more than {LARGEST_ANSWER} bytes")
                if time.monotonic() > end:
                    raise Unavailable(f"{what}: the answer does not end within {self._once_s:g} s")
            found = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status_code, found, bytes(read))

    def lines(self, what: str, path: str, silence_s: float) -> Iterator[str]:
        """The lines of a stream of events as they come.

        Raises as `ask` does; NotFound also when there is no such stream, Unavailable after `silence_s` without a byte
        and for a line of more than LONGEST_LINE bytes.
        """
        headers = {**self.headers(), "Accept": "text/event-stream"}
        with self._open(what, "GET", self._url(path), headers, None, silence_s) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            streams = found.get("content-type", "").startswith("text/event-stream")
            if response.status_code == 501 or (response.status_code < 300 and not streams):
                raise NotFound(f"{what}: the Hub offers no stream of events here")
            if response.status_code >= 300:
                raise refusal(Answer(response.status_code, found, b""), what)
            yield from lines_of(response.iter_bytes(), what)

    @contextmanager
    def _open(
        self, what: str, method: str, url: str, headers: dict[str, str], body: bytes | None, timeout_s: float
    ) -> Iterator[Any]:
        """The response to a request, its body not yet read."""
        from huggingface_hub.utils import get_session

        try:
            with get_session().stream(
                method, url, headers=headers, content=body, timeout=timeout_s, follow_redirects=False
            ) as response:
                yield response
        except StoreError:
            raise
        except Exception as error:  # the client's own HTTP library, which is another one in each of its major versions
            raise Unavailable(f"{what}: {method} {url}: {type(error).__name__}: {error}") from error


def lines_of(chunks: Iterable[bytes], what: str) -> Iterator[str]:
    """The lines of a stream, each as soon as it has ended; raises Unavailable for one longer than LONGEST_LINE."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        if b"\n" in chunk:
            *ended, held = held.split(b"\n")
            for line in ended:
                yield line.removesuffix(b"\r").decode(errors="replace")
        if len(held) > LONGEST_LINE:
            raise no_hub(what, f"a line has more than {LONGEST_LINE} bytes")


def no_hub(what: str, why: str) -> Unavailable:
    """The error for an answer that no Hub gives."""
    return Unavailable(f"{what}: {why}; is HF_ENDPOINT, or what stands between, a Hub that serves buckets?")


def same_origin(url: str, endpoint: str) -> bool:
    """Whether a URL may be asked with the token of this endpoint."""
    there, here = urlsplit(url), urlsplit(endpoint)
    return (there.scheme, there.netloc) == (here.scheme, here.netloc)


def refusal(answer: Answer, what: str) -> StoreError:
    """The error that an answer of status 300 or more means."""
    status = answer.status
    said = answer.headers.get("x-error-message") or answer.body[:200].decode(errors="replace").strip()
    message = f"{what}: HTTP {status}{': ' + said if said else ''}"
    if status in (401, 403):
        return Unauthorized(
            f"{message}; check that HF_TOKEN, or the token of `hf auth login`, is valid and has the right to do this"
        )
    if status in (404, 410):
        return NotFound(f"{message}; it does not exist, or this token may not see it")
    if status == 429:
        wait = wait_s(answer.headers)
        return RateLimited(f"{message}; the Hub asks to wait {wait:g} s", wait)
    if status == 408 or status >= 500:
        return Unavailable(f"{message}; the Hub fails for now")
    return StoreError(message)


def wait_s(headers: Mapping[str, str]) -> float:
    """Seconds that a refusal by quota asks to wait: until the window ends, or Retry-After, or a minute."""
    limit = re.search(r"\br\s*=\s*0\b.*?\bt\s*=\s*(\d{1,6})", headers.get("ratelimit", ""))
    after = re.fullmatch(r"\s*(\d{1,6})\s*", headers.get("retry-after", ""))
    found = limit or after
    return min(float(found[1]), _LONGEST_WAIT_S) if found else _DEFAULT_WAIT_S
