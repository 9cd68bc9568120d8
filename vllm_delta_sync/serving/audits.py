"""Keeps the books of audits: when one is due, whose answers are still to come, what they add up to.

Pure: no I/O, no clock. Does not decide what a wrong tensor means: `controller` does.
"""

from __future__ import annotations

from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.proof import Proof
from vllm_delta_sync.serving.state import AuditRecord


class Audits:
    """Full passes over the live weights of one engine.

    Args:
        ranks: number of ranks of this engine.
        every: versions between two full passes; 0: only on demand.
    """

    def __init__(self, ranks: int, every: int) -> None:
        self._ranks = ranks
        self._every = every
        self._running = False
        self._last = 0  # number of the last one asked for
        self._void = 0  # up to this number they failed, or were of another run's tensors
        self._at: int | None = None  # the version from which versions are counted
        self._replies: dict[int, msg.Audited] = {}

    @property
    def number(self) -> int:
        """How many were asked for so far."""
        return self._last

    def start_from(self, version: int | None) -> None:
        """Count versions from this one."""
        self._at = version

    def due(self, version: int) -> bool:
        """Whether a pass is due now that `version` is served; asking counts as a pass."""
        if self._at is None:
            self._at = version
        if not self._every or abs(version - self._at) < self._every:
            return False
        self._at = version
        return True

    def begin(self) -> msg.Audit | None:
        """The command for all ranks; None while a pass is under way."""
        if self._running:
            return None
        self._running = True
        self._last += 1
        self._replies.clear()
        return msg.Audit(self._last, attempt=self._last)

    def void(self) -> None:
        """What is under way has failed, or is of tensors that are not followed any more: its outcome is not heard."""
        self._void = self._last
        self._running = False

    def failed(self, event: msg.Failed) -> bool:
        """One rank could not, so that no other's answer counts; returns whether that is of interest."""
        if event.attempt <= self._void:
            return False
        self.void()
        return True

    def take(self, event: msg.Audited, rank: int, proof: Proof) -> AuditRecord | None:
        """One rank's answer; returns the outcome once all are there.

        Raises:
            StateHashMismatch: copies of weights differ.
        """
        if event.number <= self._void:
            return None
        self._replies[rank] = event
        if len(self._replies) < self._ranks:
            return None
        self._running = False
        replies = self._replies
        wrong = tuple(sorted({name for reply in replies.values() for name in reply.wrong}))
        versions = {reply.version for reply in replies.values()}
        one = versions.pop() if len(versions) == 1 else None
        lanes = None
        if one is not None and not wrong:
            lanes = proof.sum({r: reply.lanes for r, reply in replies.items()})
        seconds = max(reply.seconds for reply in replies.values())
        return AuditRecord(event.number, one, wrong, lanes, seconds)
