"""When a server tries again what failed, what is given up for good, and which step is not to be tried the same way.

Pure: no I/O, no clock. Does not carry anything out: `controller` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta_sync import errors
from vllm_delta_sync.wire.hop import Hop

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0

# Trying again cannot help.
_FINAL = (errors.BaseMismatch.cause, errors.UnmappedTensor.cause, errors.UnsupportedLayout.cause)
# Other objects may lead to the same version.
_DAMAGED = (
    errors.NotFound.cause, errors.MalformedObject.cause, errors.DigestMismatch.cause, errors.StateHashMismatch.cause,
    errors.BaseNeeded.cause,
)  # fmt: skip


def is_final(cause: str, *, joining: bool) -> bool:
    """Whether trying again cannot help."""
    return cause in _FINAL or (joining and cause == errors.StateHashMismatch.cause)


@dataclass(frozen=True)
class Refused:
    """A step that could not be staged, so that another way is to be looked for."""

    hop: Hop
    too_large: bool  # it changes more than may wait in memory; else it is damaged, or cannot be read here


class Retrying:
    """What is put off until when, ever longer while nothing succeeds."""

    def __init__(self) -> None:
        self._at: float | None = None  # Unix seconds
        self._wait = FIRST_RETRY_S
        self._refused: Refused | None = None
        self._stuck = False

    @property
    def waiting(self) -> bool:
        """Whether something is put off."""
        return self._at is not None

    def put_off(self, now: float) -> None:
        """Something failed; it is tried again later."""
        self._at = now + self._wait
        self._wait = min(self._wait * 2, LAST_RETRY_S)

    def not_before(self, time: float) -> None:
        """What is put off waits at least until then."""
        if self._at is not None:
            self._at = max(self._at, time)

    def due(self, now: float) -> bool:
        """Whether it is time to try again; asked once."""
        if self._at is None or now < self._at:
            return False
        self._at = None
        return True

    def no_way(self) -> None:
        """There was no way to the goal, so what LATEST says next is worth a look at once."""
        self._stuck = True

    def latest_changed(self, *, other_goal: bool) -> None:
        """LATEST says something new. What failed may not be what is wanted now, or there may be a way now."""
        if other_goal or self._stuck:
            self._at = None

    def succeeded(self) -> None:
        self._at, self._wait, self._stuck = None, FIRST_RETRY_S, False

    def step_failed(self, hop: Hop, cause: str) -> None:
        """A step could not be staged."""
        too_large = cause == errors.StagingLimit.cause
        if too_large or cause in _DAMAGED:
            self._refused = Refused(hop, too_large)

    def take_refused(self) -> Refused | None:
        """The step that the next way is to go around, if there is one; told once."""
        refused, self._refused = self._refused, None
        return refused
