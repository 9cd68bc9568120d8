"""Who may do what in the stand-in, how often, and what was asked of it so far.

Does not speak HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field

READ, WRITE = "read", "write"
XET_TOKEN_LIFE_S = 900


@dataclass(frozen=True)
class _XetToken:
    hub_token: str
    right: str
    expires: float


@dataclass
class Access:
    """Tokens of the Hub and what each may do, and the Xet tokens given out for them."""

    rights: dict[str, str] = field(default_factory=dict)  # Hub token → "read" or "write"
    xet_token_life_s: float = XET_TOKEN_LIFE_S
    _xet: dict[str, _XetToken] = field(default_factory=dict)

    def allows(self, token: str | None, right: str) -> bool:
        return right in self._granted(token)

    def _granted(self, token: str | None) -> tuple[str, ...]:
        granted = self.rights.get(token or "")
        return {WRITE: (READ, WRITE), READ: (READ,)}.get(granted or "", ())

    def grant(self, hub_token: str, right: str) -> tuple[str, int]:
        """A new Xet token and the Unix second when it ends."""
        token = secrets.token_hex(16)
        expires = time.time() + self.xet_token_life_s
        self._xet[token] = _XetToken(hub_token, right, expires)
        return token, int(expires)

    def end_xet_tokens(self) -> None:
        """End all that were given out, before their time."""
        self._xet.clear()

    def xet_allows(self, token: str | None, right: str) -> bool:
        """Whether a Xet token still stands, and the Hub token behind it too."""
        found = self._xet.get(token or "")
        if found is None or found.expires < time.time() or not self.allows(found.hub_token, found.right):
            return False
        return right == READ or found.right == WRITE


@dataclass
class Quota:
    """At most `limit` requests in each window."""

    limit: int
    window_s: float
    _begin: float = 0.0
    _used: int = 0

    def take(self) -> tuple[bool, int, int]:
        """Ask for one request: whether it may go on, how many are left, seconds until the window ends."""
        now = time.monotonic()
        if now >= self._begin + self.window_s:
            self._begin, self._used = now, 0
        self._used += 1
        reset = max(1, round(self._begin + self.window_s - now))
        return self._used <= self.limit, max(0, self.limit - self._used), reset


@dataclass
class Meter:
    """Quotas by class of request (`api`, `resolver`), and counts by class and by route."""

    quotas: dict[str, Quota] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
