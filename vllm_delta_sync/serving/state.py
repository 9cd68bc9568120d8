"""How an engine stands, as the world may know it: phase, versions, what each commit cost, failures, the last audit.

Does not decide (`controller` does) and does not write anything down (`status` does).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from vllm_delta_sync.serving.messages import Lanes, Staged
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer

KEPT_COMMITS = 256


class Phase(enum.Enum):
    """Where an engine stands."""

    WAITING = "waiting"  # nothing published, or not known yet
    JOINING = "joining"  # reading the base, tracing the layout, proving the weights; also when a new run begins
    FOLLOWING = "following"  # serving `served`, nothing under way
    PLANNING = "planning"  # looking for the next step to the goal
    STAGING = "staging"
    COMMITTING = "committing"
    HALTED = "halted"  # serving the last good version; will not follow any more
    POISONED = "poisoned"  # a commit failed and could not be rolled back


@dataclass(frozen=True)
class CommitRecord:
    """What one step cost; for metrics and status."""

    version: int
    hop: str  # what the step was made of: delta, fold or anchor
    source: int | None  # the version before; None after weights of no version
    step: int | None
    changed: int  # elements
    fetched_bytes: int  # from the store, over all ranks
    cached_bytes: int  # from the node's cache, over all ranks
    fetch_seconds: float  # slowest rank
    stage_seconds: float  # slowest rank
    commit_seconds: float  # the engine's pause
    at: float  # Unix seconds

    @classmethod
    def of(cls, hop: Hop, source: int | None, staged: Sequence[Staged], commit_seconds: float, at: float) -> Self:
        """A step that was committed; `staged` are the ranks' answers, the leader's first."""
        changed = sum(reply.changed for reply in staged) if hop.kind == "anchor" else staged[0].changed
        return cls(
            version=hop.to,
            hop=hop.kind,
            source=source,
            step=staged[0].step,
            changed=changed,
            fetched_bytes=sum(reply.fetched_bytes for reply in staged),
            cached_bytes=sum(reply.cached_bytes for reply in staged),
            fetch_seconds=max(reply.fetch_seconds for reply in staged),
            stage_seconds=max(reply.stage_seconds for reply in staged),
            commit_seconds=commit_seconds,
            at=at,
        )


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
    run: str | None = None  # of LATEST
    served_run: str | None = None
    served: int | None = None
    latest: int | None = None
    pin: int | None = None  # what followers are to serve instead of the latest version
    run_changes: int = 0
    committed: int = 0  # steps committed by this engine
    commits: deque[CommitRecord] = field(default_factory=lambda: deque(maxlen=KEPT_COMMITS))  # the last of them
    failures: dict[str, int] = field(default_factory=dict)
    last_error: str | None = None  # in words, with its cause
    last_cause: str | None = None
    unmapped: tuple[str, ...] = ()
    audit: AuditRecord | None = None
    audits: int = 0  # audits asked for so far
    empty: bool = False  # the store answers, and holds nothing yet
    first_goal: int | None = None  # the goal when the log was first seen
    reached: bool = False  # whether a goal was served since

    @property
    def goal(self) -> int | None:
        """The version to serve."""
        return self.latest if self.pin is None else self.pin

    @property
    def lag(self) -> int | None:
        """Versions between the one served and the goal; None while it cannot be told."""
        if self.served is None or self.goal is None or self.served_run != self.run:
            return None
        return abs(self.goal - self.served)

    @property
    def settled(self) -> bool:
        """What was to be served at the start is, or nothing is published yet, or nothing will be followed."""
        if self.phase in (Phase.HALTED, Phase.POISONED):
            return True
        return self.empty if self.first_goal is None else self.reached

    def see(self, pointer: LatestPointer) -> None:
        """LATEST says this now."""
        changed = self.run is not None and self.run != pointer.run
        self.run_changes += changed
        self.run, self.latest, self.pin, self.empty = pointer.run, pointer.version, pointer.pin, False
        if self.first_goal is None or (changed and not self.reached):
            self.first_goal = pointer.goal

    def serve(self, run: str, version: int) -> None:
        """That version is served now."""
        self.served_run, self.served = run, version
        if run == self.run and self.first_goal is not None:
            onward = self.pin is None and version >= self.first_goal
            self.reached = self.reached or onward or version == self.goal
