"""Leave to use the Xet store, as the Hub gives it for a bucket and a right: one for all of a process.

Does not decide when a leave is of no use any more: it takes its caller's word, or the time that it was given for.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from vllm_delta_sync.store.hub import Hub, no_hub

Right = Literal["read", "write"]

_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave to read or write the contents of one bucket, for a while."""

    endpoint: str  # of the Xet store
    token: str
    expires: int  # Unix seconds

    @property
    def arguments(self) -> dict[str, Any]:
        """As hf_xet takes them. Without a way to renew it: a transfer ends long before, and renewing has hung."""
        return {"endpoint": self.endpoint, "token": self.token, "token_expiry_unix_secs": self.expires}


@dataclass(slots=True)
class _Place:
    """What there is for one key, and what is being asked for: the process that asks, and what will come of it."""

    leave: Leave | None = None
    asked: tuple[int, Future[Leave]] | None = None


_lock = threading.Lock()
_places: dict[tuple[str, str, Right, str], _Place] = {}  # endpoint, bucket, right, authorization → leave


def leave(hub: Hub, bucket: str, right: Right, what: str, *, other_than: Leave | None = None) -> Leave:
    """Leave for whoever the environment says is asking, another than the one given. Raises as `Hub.ask` does.

    The Hub is asked once for all who want one at the same time, and what it refuses or leaves unanswered is so for all
    of them: who came in the meantime does not ask again, one after the other.
    """
    key = hub.endpoint, bucket, right, hub.headers().get("authorization", "")
    with _lock:
        place = _places.setdefault(key, _Place())
        held = place.leave
        if held is not None and held is not other_than and held.expires >= time.time() + _MARGIN_S:
            return held
        others = place.asked
        mine: Future[Leave] = Future()
        if others is None or others[0] != os.getpid():
            place.asked, others = (os.getpid(), mine), None
    if others is not None:
        return others[1].result()
    try:
        found = _ask(hub, bucket, right, what)
    except BaseException as error:
        with _lock:
            place.asked = None
        mine.set_exception(error)
        raise
    with _lock:
        place.leave, place.asked = found, None
    mine.set_result(found)
    return found


def _ask(hub: Hub, bucket: str, right: Right, what: str) -> Leave:
    answer = hub.ask(what, "GET", f"/api/buckets/{bucket}/xet-{right}-token").json(what)
    try:
        endpoint, token, expires = answer["casUrl"], answer["accessToken"], answer["exp"]
    except (KeyError, TypeError):
        endpoint = token = expires = None
    if not isinstance(endpoint, str) or not isinstance(token, str) or not isinstance(expires, int | float):
        raise no_hub(what, "the answer is no Xet token")
    return Leave(endpoint, token, int(expires))
