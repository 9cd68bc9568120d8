"""Follows the Hub's feed of changes to a bucket, and says only that something may have changed.

Does not trust it: whoever is told looks for themselves, and polls in any case.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlencode

from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized
from vllm_delta_sync.store.hub import LONGEST_LINE, Hub, no_hub

SILENCE_S = 60.0
"""Seconds without a line after which a connection is given up; the Hub sends a comment every 30."""

_FIRST_BREAK_S, _LONGEST_BREAK_S = 1.0, 60.0
LASTING_S = 60.0
"""Seconds after which a connection that breaks is taken for one that worked, and the next comes soon."""


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; both empty for the sign of life between events."""

    name: str
    data: str


def changes(hub: Hub, bucket: str, path: str, stop: threading.Event) -> Iterator[None]:
    """Yield whenever the file may have changed; see `watch.Watchable.changes`."""
    cursor: str | None = None
    breaks = 0
    while not stop.is_set():
        pause = 0.0
        began = time.monotonic()
        try:
            query = f"?{urlencode({'cursor': cursor})}" if cursor else ""
            lines = hub.lines(f"following {bucket}", f"/api/buckets/{bucket}/events{query}", SILENCE_S)
            begun = False
            for event in events(lines):
                if stop.is_set():
                    return
                cursor, touched = after(event, cursor, path)
                # What happened before the feed began to flow, or between two connections, nobody may have told.
                if touched or not begun:
                    begun = True
                    yield None
        except (NotFound, Unauthorized):
            return
        except RateLimited as error:
            pause = error.retry_after
        except StoreError:
            cursor = None  # it may be what the Hub does not like
        breaks = following_break(breaks, time.monotonic() - began)
        pause = max(pause, random.uniform(0.5, 1) * break_s(breaks))
        stop.wait(pause)


def following_break(breaks: int, lasted_s: float) -> int:
    """The number in a row of a break of a connection that lasted so long: each connection costs a request."""
    return 1 if lasted_s >= LASTING_S else breaks + 1


def break_s(breaks: int) -> float:
    """Seconds until the next connection after so many breaks in a row, at most."""
    return min(_FIRST_BREAK_S * 2.0 ** min(breaks, 10), _LONGEST_BREAK_S)


def after(event: Event, cursor: str | None, path: str) -> tuple[str | None, bool]:
    """The cursor after an event, and whether the file at `path` may have changed by it."""
    if event.name not in ("ready", "changes", "reset", "reconnect"):
        return cursor, False
    if event.name == "reset":
        return None, True
    try:
        said = json.loads(event.data or "{}")
        following = said.get("cursor") or cursor
        touched = event.name == "changes" and any(change.get("path") == path for change in said["changes"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return cursor, True
    return (following if isinstance(following, str) else cursor), touched


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Server-sent events of a stream of lines; a comment gives an empty one. Raises Unavailable for a huge one."""
    name, data = "", ""
    for line in lines:
        if line.startswith(":"):
            yield Event("", "")
        elif not line:
            if name or data:
                yield Event(name, data)
            name, data = "", ""
        else:
            kind, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if kind == "event":
                name = value
            elif kind == "data":
                data += value
        if len(data) > LONGEST_LINE:
            raise no_hub("following a bucket", "an event has more than a megabyte")
