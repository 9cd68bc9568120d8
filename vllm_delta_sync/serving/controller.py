"""Decides what an engine does next: a pure state machine from events to actions.

No I/O, no clock and no thread (`loop` has them): every event carries its time, so that each decision can be tested as
a table.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_delta_sync import errors
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.coverage import cover
from vllm_delta_sync.serving.messages import Lanes, Message, Ref
from vllm_delta_sync.serving.proof import Proof
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire.tensors import TensorSpec

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
LEADER = 0
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


# --- actions: what the loop carries out ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Send:
    """To one rank, or to all."""

    message: Message
    rank: int | None = None


@dataclass(frozen=True)
class Trace:
    """On the engine thread: let every rank trace its model's loader."""


@dataclass(frozen=True)
class Adopt:
    """On the engine thread: what is served from now on is `version`, which it was loaded with."""

    version: int


@dataclass(frozen=True)
class Commit:
    """On the engine thread, between two steps: scatter `version` on every rank, or on none."""

    version: int


@dataclass(frozen=True)
class Stop:
    """On the engine thread: stop the server (`on_error: stop`)."""

    text: str


Action = Send | Trace | Adopt | Commit | Stop


# --- events from the engine thread -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Traced:
    """Outcome of Trace: one layout per rank, or why not."""

    specs: tuple[TensorSpec, ...]
    layouts: tuple[RankLayout, ...]


@dataclass(frozen=True)
class EngineFailed:
    """A Trace could not be carried out."""

    cause: str
    text: str


@dataclass(frozen=True)
class Committed:
    """Outcome of Commit.

    `error` is None on success; `trusted` is False when the ranks could not be brought back to the version before.
    """

    version: int
    seconds: float  # the engine thread's pause, RPC included
    error: tuple[str, str] | None = None  # cause, text
    trusted: bool = True


@dataclass(frozen=True)
class Tick:
    """Time passes."""


Event = Message | Traced | EngineFailed | Committed | Tick


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

    @property
    def settled(self) -> bool:
        """Nothing newer is known, or nothing newer will be followed."""
        if self.phase in (Phase.HALTED, Phase.POISONED):
            return True
        if self.phase is Phase.WAITING:
            return self.empty
        return self.phase is Phase.FOLLOWING and self.served == self.latest


class Controller:
    """The engine's side of following a log.

    Args:
        ranks: number of ranks of this engine.
        ignore_unmapped: policy for published tensors that no rank loads.
        stop_on_error: stop the server instead of serving the last good version.
        audit_every: versions between two full passes; 0: only on demand.
    """

    def __init__(self, ranks: int, *, ignore_unmapped: bool, stop_on_error: bool, audit_every: int) -> None:
        self.status = Status()
        self._ranks = ranks
        self._ignore_unmapped = ignore_unmapped
        self._stop_on_error = stop_on_error
        self._audit_every = audit_every
        self._refs: dict[int, Ref] = {}
        self._replies: dict[int, Message] = {}
        self._proof: Proof | None = None
        self._retry_at: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._auditing = False
        self._audit_replies: dict[int, msg.Audited] = {}

    # --- entry -------------------------------------------------------------------------------------------------------
    def handle(self, event: Event, now: float, rank: int = LEADER) -> list[Action]:
        """Take one event; returns what is to be done, in order. `now`: Unix seconds; `rank`: the sender "
        "of a message."""
        try:
            return self._dispatch(event, now, rank)
        except DeltaSyncError as error:
            return self._refuse(error.cause, str(error), now)

    def _dispatch(self, event: Event, now: float, rank: int) -> list[Action]:
        if self.status.phase in (Phase.HALTED, Phase.POISONED):
            return self._bystand(event)
        match event:
            case msg.Tip():
                return self._tip(event)
            case msg.NothingPublished():
                self.status.empty = True
                return []
            case msg.PollFailed():
                return self._note(event.cause, event.text)
            case msg.BaseLoaded():
                return [Trace()] if self._all(event, rank) else []
            case Traced():
                return self._traced(event)
            case msg.Proved():
                return self._proved() if self._all(event, rank) else []
            case msg.Located():
                return self._located(event)
            case msg.Staged():
                return self._staged(event, rank)
            case Committed():
                return self._committed(event, now)
            case EngineFailed():
                return self._halt(event.cause, event.text)
            case msg.Failed():
                return self._refuse(event.cause, f"rank {rank}: {event.text}", now)
            case msg.Lost():
                return self._halt("rank_lost", f"rank {rank} left: {event.text}")
            case msg.Audited():
                return self._audited(event, rank)
            case msg.WantAudit():
                return self._audit()
            case Tick():
                return self._tick(now)
        raise AssertionError(f"unexpected event {event!r}")

    def _bystand(self, event: Event) -> list[Action]:
        """Halted: keep telling how far behind it is, and which version a commit under way ended with."""
        if isinstance(event, msg.Tip):
            self.status.latest = event.version
        elif isinstance(event, Committed) and event.error is None:
            self.status.served = event.version
        return []

    # --- joining -----------------------------------------------------------------------------------------------------
    def _tip(self, tip: msg.Tip) -> list[Action]:
        self.status.run, self.status.latest, self.status.empty = tip.run, tip.version, False
        self._refs.update({ref.version: ref for ref in tip.refs})
        if self._retry_at is not None:
            return []
        if self.status.phase is Phase.WAITING:
            return self._join()
        return self._advance() if self.status.phase is Phase.FOLLOWING else []

    def _join(self) -> list[Action]:
        assert self.status.run is not None
        self.status.phase = Phase.JOINING
        self._replies.clear()
        return [Send(msg.LoadBase(self.status.run, self._refs[0]))]

    def _traced(self, event: Traced) -> list[Action]:
        unsupported = [f"{name}: {why}" for layout in event.layouts for name, why in layout.unsupported]
        if unsupported:
            raise errors.UnsupportedLayout(
                f"{len(unsupported)} tensors cannot be patched in place, first: {unsupported[0]}"
            )
        coverage = cover([layout.regions for layout in event.layouts], event.specs)
        if coverage.unmapped and not self._ignore_unmapped:
            raise errors.UnmappedTensor(
                f"the serving model loads {len(coverage.unmapped)} published tensors on no rank: "
                f"{_some(coverage.unmapped)}; "
                "set `unmapped: ignore` to serve without them"
            )
        self.status.unmapped = coverage.unmapped
        counts = [len(layout.regions) for layout in event.layouts]
        self._proof = Proof(coverage, counts, [spec.name for spec in event.specs])
        self._replies.clear()
        return [Send(msg.Prove())]

    def _proved(self) -> list[Action]:
        assert self._proof is not None
        lanes = self._proof.sum(
            {rank: reply.lanes for rank, reply in self._replies.items() if isinstance(reply, msg.Proved)}
        )
        refs = tuple(self._refs[version] for version in sorted(self._refs))
        return [Send(msg.Locate(refs, lanes, self._proof.skipped), LEADER)]

    def _located(self, event: msg.Located) -> list[Action]:
        if event.version is None:
            raise errors.BaseMismatch(event.text)
        self.status.served = event.version
        self.status.phase = Phase.FOLLOWING
        self._retry_s = FIRST_RETRY_S
        return [Send(msg.Joined(self._refs[event.version])), Adopt(event.version), *self._advance()]

    # --- following ---------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Action]:
        assert self.status.served is not None
        if self.status.latest is None or self.status.served >= self.status.latest:
            return []
        self.status.phase = Phase.STAGING
        self._replies.clear()
        return [Send(msg.Stage(self._refs[self.status.served + 1]))]

    def _staged(self, event: msg.Staged, rank: int) -> list[Action]:
        if self.status.phase is not Phase.STAGING or event.version != (self.status.served or 0) + 1:
            return []  # an answer to a command that was dropped meanwhile
        if not self._all(event, rank):
            return []
        assert self._proof is not None
        replies = {r: reply for r, reply in self._replies.items() if isinstance(reply, msg.Staged)}
        leader = replies[LEADER]
        self._proof.check_effects(
            {r: self._proof.dense(r, reply.regions, reply.lanes) for r, reply in replies.items()},
            leader.tensors,
            leader.effects,
        )
        self.status.phase = Phase.COMMITTING
        return [Commit(event.version)]

    def _committed(self, event: Committed, now: float) -> list[Action]:
        if event.error is not None:
            cause, text = event.error
            if event.trusted:
                return self._refuse(cause, text, now)
            self._note(cause, text)
            return self._end(
                Phase.POISONED, errors.Poisoned.cause, f"version {event.version} could not be rolled back: {text}"
            )
        staged = [reply for reply in self._replies.values() if isinstance(reply, msg.Staged)]
        leader = self._replies[LEADER]
        assert isinstance(leader, msg.Staged)
        self.status.committed += 1
        self.status.commits.append(
            CommitRecord(
                version=event.version,
                step=leader.step,
                changed=leader.changed,
                fetched_bytes=sum(reply.fetched_bytes for reply in staged),
                fetch_seconds=max(reply.fetch_seconds for reply in staged),
                stage_seconds=max(reply.stage_seconds for reply in staged),
                commit_seconds=event.seconds,
                at=now,
            )
        )
        self.status.served = event.version
        self.status.phase = Phase.FOLLOWING
        self._retry_s = FIRST_RETRY_S
        due = self._audit_every and event.version % self._audit_every == 0
        return [*(self._audit() if due else []), *self._advance()]

    # --- audits ------------------------------------------------------------------------------------------------------
    def _audit(self) -> list[Action]:
        if self.status.served is None or self._auditing:
            return []
        self._auditing = True
        self.status.audits += 1
        self._audit_replies.clear()
        return [Send(msg.Audit(self.status.audits))]

    def _audited(self, event: msg.Audited, rank: int) -> list[Action]:
        self._audit_replies[rank] = event
        if len(self._audit_replies) < self._ranks:
            return []
        assert self._proof is not None
        self._auditing = False
        replies = self._audit_replies
        wrong = tuple(sorted({name for reply in replies.values() for name in reply.wrong}))
        versions = {reply.version for reply in replies.values()}
        one = versions.pop() if len(versions) == 1 else None
        lanes = None
        if one is not None and not wrong:
            lanes = self._proof.sum({r: reply.lanes for r, reply in replies.items()})
        seconds = max(reply.seconds for reply in replies.values())
        self.status.audit = AuditRecord(event.number, one, wrong, lanes, seconds)
        if wrong:
            return self._halt(
                "audit",
                f"{len(wrong)} live tensors are not what was committed, something else writes to them: {_some(wrong)}",
            )
        return []

    # --- trouble -----------------------------------------------------------------------------------------------------
    def _refuse(self, cause: str, text: str, now: float) -> list[Action]:
        """Serve on what is served, and try again later unless trying again cannot help."""
        if cause in (errors.BaseMismatch.cause, errors.UnmappedTensor.cause, errors.UnsupportedLayout.cause):
            return self._halt(cause, text)
        actions = self._note(cause, text)
        self.status.phase = Phase.WAITING if self.status.served is None else Phase.FOLLOWING
        self._retry_at = now + self._retry_s
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        return [*actions, Send(msg.Drop())]

    def give_up(self, cause: str, text: str) -> None:
        """Follow no more; for a defect in what carries the actions out."""
        self._halt(cause, text)

    def _halt(self, cause: str, text: str) -> list[Action]:
        return self._end(Phase.HALTED, cause, text)

    def _end(self, phase: Phase, cause: str, text: str) -> list[Action]:
        self._note(cause, text)
        self.status.phase = phase
        return [Stop(text)] if self._stop_on_error else []

    def _note(self, cause: str, text: str) -> list[Action]:
        self.status.failures[cause] = self.status.failures.get(cause, 0) + 1
        self.status.last_error = f"{cause}: {text}"
        return []

    def _tick(self, now: float) -> list[Action]:
        if self._retry_at is None or now < self._retry_at:
            return []
        self._retry_at = None
        return self._join() if self.status.phase is Phase.WAITING else self._advance()

    def _all(self, reply: Message, rank: int) -> bool:
        self._replies[rank] = reply
        return len(self._replies) == self._ranks and all(type(r) is type(reply) for r in self._replies.values())


def _some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
