"""What `publish` gives back: the figures known at once, and those that come when the version is durable.

Does not start or stop anything.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is durable in the log."""

    version: int
    manifest: str  # its key, relative to the run
    sha256: str  # of the manifest, hex
    bytes: int  # of shards and table, compressed
    encode_s: float  # seconds of encoding, in the background
    upload_s: float  # seconds from the first object written to LATEST, in the background


@dataclass(frozen=True, slots=True)
class Publication:
    """A version on its way into the log."""

    version: int
    step: int | None  # the trainer's own
    changed: int  # elements whose bits differ from the version before
    elements: int  # of the whole model
    waited_s: float  # seconds the caller was blocked because max_in_flight versions were on their way
    diff_s: float  # seconds the caller was blocked to find the changes
    outcome: Future[Published] = field(repr=False, compare=False)

    @property
    def durable(self) -> bool:
        """Whether the version is in the log by now."""
        return self.outcome.done() and self.outcome.exception() is None

    def result(self, timeout: float | None = None) -> Published:
        """Wait until the version is durable.

        Raises PublishError when it, or one before it, could not be written; TimeoutError after `timeout` seconds.
        """
        return self.outcome.result(timeout)
