"""What a store that tells of changes promises: an accelerator for readers that poll anyway.

Does not say what has changed: a reader looks for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Watchable(Protocol):
    """A store that may push; `isinstance(store, Watchable)` tells whether to ask at all."""

    def changes(self, key: str, stop: threading.Event) -> Iterator[None]:
        """Yield whenever the object may have changed, at once when the feed begins to flow, and after each break in it.

        Blocks between two changes, so it wants a thread of its own; reconnects by itself and never raises for what the
        store does. Ends when the store offers no feed here, and within a minute after `stop` is set.
        """
        ...
