"""What goes wrong on purpose: a list of faults, each for the next requests that fit it.

Does not decide when a test wants which.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tests.hub.xet import HEADER, parse_xorb

KINDS = (
    "status",  # answers with `status` and `headers` and does nothing
    "stall",  # accepts, and never answers
    "stall_body",  # sends half of the body, and then nothing more
    "truncate",  # promises the whole body, sends half of it and closes
    "flip",  # one bit of the body's last byte is wrong
    "swap",  # stored chunks of the right sizes, with other bytes in them
    "lose",  # of a batch, says which operations on paths with `path` in them failed, and does not do them
    "lose_silently",  # the same, but says that all succeeded
)


@dataclass
class Fault:
    """A fault and the requests that it befalls."""

    kind: str
    on: str  # name of a route, or a class of them
    path: str = ""  # must be part of the request's path; for `lose`, of the operation's
    method: str = ""  # of any, when empty
    skip: int = 0  # fitting requests to leave alone first
    times: int | None = 1  # fitting requests to befall then; None: all
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Fault:
        """Raises ValueError for what is no fault."""
        unknown = data.keys() - {item.name for item in fields(cls)}
        if unknown or data.get("kind") not in KINDS:
            raise ValueError(f"no such fault: {data}")
        return cls(**data)

    def befalls(self, route: str, kind: str, method: str, path: str) -> bool:
        """Whether this request is to fail; counts it when it fits."""
        fits = self.on in (route, kind) and self.method in ("", method)
        if not fits or (not self.kind.startswith("lose") and self.path not in path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0


def spoiled(kind: str, body: bytes) -> bytes:
    """The body as a fault changes it."""
    if kind == "flip" and body:
        return body[:-1] + bytes([body[-1] ^ 1])
    if kind == "swap":
        inverted = bytearray(255 - byte for byte in body)
        for chunk in parse_xorb(body):
            inverted[chunk.start : chunk.start + HEADER] = body[chunk.start : chunk.start + HEADER]
        return bytes(inverted)
    return body
