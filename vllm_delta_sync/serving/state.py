"""How an engine stands, as the world may know it: phase, versions, what each commit cost, failures, the last audit.

Does not decide (`controller` does) and does not write anything down (`status` does).
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from vllm_delta_sync.serving.messages import Lanes

KEPT_COMMITS = 256


class Phase(enum.Enum):
    """Where an engine stands."""

    WAITING = "waiting"  # nothing published, or not known yet
    JOINING = "joining"  # reading the base, tracing the layout, proving the weights
    FOLLOWING = "following"  # serving `served`, nothing under way
    STAGING = "staging"
    COMMITTING = "committing"
    HALTED = "halted"  # serving the last good version; will not follow any more
    POISONED = "poisoned"  # a commit failed and could not be rolled back


@dataclass(frozen=True)
class CommitRecord:
    """What one version cost; for metrics and status."""

    version: int
    step: int | None
    changed: int  # elements
    fetched_bytes: int  # over all ranks
    fetch_seconds: float  # slowest rank
    stage_seconds: float  # slowest rank
    commit_seconds: float  # the engine's pause
    at: float  # Unix seconds


@dataclass(frozen=True)
class AuditRecord:
    """What a full pass found."""

    number: int
    version: int | None  # None when ranks ended at different versions
    wrong: tuple[str, ...]
    lanes: Lanes | None  # per tensor, when all ranks ended at one version and all copies agree
    seconds: float


@dataclass
class Status:
    """What the world may know of an engine; `loop` writes it out."""

    phase: Phase = Phase.WAITING
    run: str | None = None
    served: int | None = None
    latest: int | None = None
    committed: int = 0  # versions committed by this engine
    commits: deque[CommitRecord] = field(default_factory=lambda: deque(maxlen=KEPT_COMMITS))  # the last of them
    failures: dict[str, int] = field(default_factory=dict)
    last_error: str | None = None
    unmapped: tuple[str, ...] = ()
    audit: AuditRecord | None = None
    audits: int = 0  # audits asked for so far
    empty: bool = False  # the store answers, and holds nothing yet
    goal: int | None = None  # what was latest when the log was first seen

    @property
    def settled(self) -> bool:
        """What was latest at the start is served, or nothing is published yet, or nothing will be followed."""
        if self.phase in (Phase.HALTED, Phase.POISONED):
            return True
        if self.goal is None:
            return self.empty
        return self.served is not None and self.served >= self.goal
