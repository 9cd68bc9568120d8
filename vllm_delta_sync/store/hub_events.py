"""Follows the Hub's feed of changes to a bucket, and says only that something may have changed.

Does not trust it: whoever is told looks for themselves, and polls in any case.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlencode

from vllm_delta_sync.errors import NotFound, RateLimited, StoreError, Unauthorized
from vllm_delta_sync.store.hub import Hub, no_hub

SILENCE_S = 60.0
"""Seconds without a line after which a connection is given up; the Hub sends a comment every 30."""

_FIRST_BREAK_S, _LONGEST_BREAK_S = 1.0, 60.0
_LONGEST_LINE = 1 << 20


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
                    begun, breaks = True, 0
                    yield None
        except (NotFound, Unauthorized):
            return
        except RateLimited as error:
            pause = error.retry_after
        except StoreError:
            cursor = None  # it may be what the Hub does not like
        breaks += 1
        pause = max(pause, random.uniform(0.5, 1) * min(_FIRST_BREAK_S * 2.0 ** min(breaks, 10), _LONGEST_BREAK_S))
        stop.wait(pause)


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
    except (ValueError, KeyError, TypeError, AttributeError):
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
        if len(data) > _LONGEST_LINE:
            raise no_hub("following a bucket", "an event has more than a megabyte")
