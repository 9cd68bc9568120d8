"""Leave to use the Xet store, as the Hub gives it for a bucket and a right: one for all of a process.

Does not decide when a leave is of no use any more: it takes its caller's word, or the time that it was given for.
"""

from __future__ import annotations

import threading
import time
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


class _Place:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.leave: Leave | None = None


_lock = threading.Lock()
_places: dict[tuple[str, str, Right, str], _Place] = {}  # endpoint, bucket, right, authorization → leave


def leave(hub: Hub, bucket: str, right: Right, what: str, *, other_than: Leave | None = None) -> Leave:
    """Leave for whoever the environment says is asking, another than the one given. Raises as `Hub.ask` does."""
    key = hub.endpoint, bucket, right, hub.headers().get("authorization", "")
    with _lock:
        place = _places.setdefault(key, _Place())
    with place.lock:
        held = place.leave
        if held is None or held is other_than or held.expires < time.time() + _MARGIN_S:
            held = place.leave = _ask(hub, bucket, right, what)
        return held


def _ask(hub: Hub, bucket: str, right: Right, what: str) -> Leave:
    answer = hub.ask(what, "GET", f"/api/buckets/{bucket}/xet-{right}-token").json(what)
    try:
        endpoint, token, expires = answer["casUrl"], answer["accessToken"], answer["exp"]
    except (KeyError, TypeError):
        endpoint = token = expires = None
    if not isinstance(endpoint, str) or not isinstance(token, str) or not isinstance(expires, int | float):
        raise no_hub(what, "the answer is no Xet token")
    return Leave(endpoint, token, int(expires))
