"""Decides what an engine does next: a pure state machine from events to actions.

No I/O, no clock and no thread (`loop` has them): every event carries its time, so that each decision can be tested as a
table. Whatever is given up gets a new attempt number, and answers that carry an older one are not heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_delta_sync import errors
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import (
    Action,
    Adopt,
    Commit,
    Committed,
    EngineFailed,
    Event,
    Send,
    Stop,
    Tick,
    Trace,
    Traced,
)
from vllm_delta_sync.serving.coverage import cover
from vllm_delta_sync.serving.messages import Message, Ref
from vllm_delta_sync.serving.proof import Proof
from vllm_delta_sync.serving.state import AuditRecord, CommitRecord, Phase, Status

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
LEADER = 0

# Trying again cannot help.
_FINAL = (errors.BaseMismatch.cause, errors.UnmappedTensor.cause, errors.UnsupportedLayout.cause)
_NUMBERED = (msg.BaseLoaded, msg.Proved, msg.Located, msg.Holding, msg.Staged, msg.Failed, Traced, EngineFailed)


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
        self._attempt = 0
        self._proof: Proof | None = None
        self._retry_at: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._auditing = False
        self._audit_replies: dict[int, msg.Audited] = {}

    # --- entry -------------------------------------------------------------------------------------------------------
    def handle(self, event: Event, now: float, rank: int = LEADER) -> list[Action]:
        """Take one event; returns what is to be done, in order.

        Args:
            now: Unix seconds.
            rank: the sender, of a message.
        """
        try:
            return self._dispatch(event, now, rank)
        except DeltaSyncError as error:
            return self._refuse(error.cause, str(error), now)

    def _dispatch(self, event: Event, now: float, rank: int) -> list[Action]:
        if self.status.phase in (Phase.HALTED, Phase.POISONED):
            return self._bystand(event, now)
        if isinstance(event, _NUMBERED) and event.attempt != self._attempt and not _of_audit(event):
            return []
        match event:
            case msg.Tip():
                return self._tip(event)
            case msg.NothingPublished():
                self.status.empty = True
                return []
            case msg.PollFailed():
                return self._note(event.cause, event.text)
            case msg.BaseLoaded():
                return [Trace(self._attempt)] if self._all(event, rank) else []
            case Traced():
                return self._traced(event)
            case msg.Proved():
                return self._proved() if self._all(event, rank) else []
            case msg.Located():
                return self._located(event)
            case msg.Holding():
                return self._joined(event) if self._all(event, rank) else []
            case msg.Staged():
                return self._staged() if self._all(event, rank) else []
            case Committed():
                return self._committed(event, now)
            case EngineFailed():
                return self._halt(event.cause, event.text)
            case msg.Failed() if _of_audit(event):
                self._auditing = False
                return self._note(event.cause, f"audit on rank {rank}: {event.text}")
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

    def _bystand(self, event: Event, now: float) -> list[Action]:
        """Halted: keep telling how far behind it is, and how a commit under way ended."""
        if isinstance(event, msg.Tip):
            self.status.latest = event.version
        elif isinstance(event, Committed) and event.error is None:
            self._record(event, now)
        elif isinstance(event, Committed) and not event.trusted:
            return self._poisoned(event)
        return []

    # --- joining -----------------------------------------------------------------------------------------------------
    def _tip(self, tip: msg.Tip) -> list[Action]:
        self.status.run, self.status.latest, self.status.empty = tip.run, tip.version, False
        self._refs.update({ref.version: ref for ref in tip.refs})
        if self.status.goal is None:
            self.status.goal = tip.version
        if self._retry_at is not None:
            return []
        if self.status.phase is Phase.WAITING:
            return self._join()
        return self._advance() if self.status.phase is Phase.FOLLOWING else []

    def _join(self) -> list[Action]:
        assert self.status.run is not None
        self.status.phase = Phase.JOINING
        return [self._command(msg.LoadBase(self.status.run, self._refs[0]))]

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
        return [self._command(msg.Prove())]

    def _proved(self) -> list[Action]:
        assert self._proof is not None
        lanes = self._proof.sum(
            {rank: reply.lanes for rank, reply in self._replies.items() if isinstance(reply, msg.Proved)}
        )
        refs = tuple(self._refs[version] for version in sorted(self._refs))
        return [self._command(msg.Locate(refs, lanes, self._proof.skipped), LEADER)]

    def _located(self, event: msg.Located) -> list[Action]:
        if event.version is None:
            raise errors.BaseMismatch(event.text)
        return [self._command(msg.Joined(self._refs[event.version]))]

    def _joined(self, event: msg.Holding) -> list[Action]:
        assert self.status.run is not None
        self.status.served = event.version
        self._succeed()
        return [Adopt(self.status.run, event.version), *self._advance()]

    # --- following ---------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Action]:
        assert self.status.served is not None
        if self.status.latest is None or self.status.served >= self.status.latest:
            return []
        self.status.phase = Phase.STAGING
        return [self._command(msg.Stage(self._refs[self.status.served + 1]))]

    def _staged(self) -> list[Action]:
        assert self._proof is not None
        replies = {r: reply for r, reply in self._replies.items() if isinstance(reply, msg.Staged)}
        leader = replies[LEADER]
        self._proof.check_effects(
            {r: self._proof.dense(r, reply.regions, reply.lanes) for r, reply in replies.items()},
            leader.tensors,
            leader.effects,
        )
        self.status.phase = Phase.COMMITTING
        return [Commit(leader.version)]

    def _committed(self, event: Committed, now: float) -> list[Action]:
        if event.error is not None:
            cause, text = event.error
            if event.trusted:
                return self._refuse(cause, text, now)
            return self._poisoned(event)
        self._record(event, now)
        self._succeed()
        due = self._audit_every and event.version % self._audit_every == 0
        return [*(self._audit() if due else []), *self._advance()]

    def _poisoned(self, event: Committed) -> list[Action]:
        assert event.error is not None
        self._note(*event.error)
        text = f"version {event.version} could not be rolled back: {event.error[1]}"
        return self._end(Phase.POISONED, errors.Poisoned.cause, text)

    def _succeed(self) -> None:
        self.status.phase = Phase.FOLLOWING
        self._retry_at, self._retry_s = None, FIRST_RETRY_S

    def _record(self, event: Committed, now: float) -> None:
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
        self._refs.pop(event.version - 1, None)

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
        joining = self.status.phase is Phase.JOINING
        if cause in _FINAL or (joining and cause == errors.StateHashMismatch.cause):
            return self._halt(cause, text)
        actions = self._note(cause, text)
        self.status.phase = Phase.WAITING if self.status.served is None else Phase.FOLLOWING
        self._retry_at = now + self._retry_s
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        return [*actions, self._command(msg.Drop())]

    def give_up(self, cause: str, text: str) -> list[Action]:
        """Follow no more; for a defect in what carries the actions out."""
        return self._halt(cause, text)

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

    def _command(self, message: Message, rank: int | None = None) -> Send:
        """Begin a new attempt with this command."""
        self._attempt += 1
        self._replies.clear()
        return Send(replace(message, attempt=self._attempt), rank)

    def _all(self, reply: Message, rank: int) -> bool:
        self._replies[rank] = reply
        return len(self._replies) == self._ranks


def _of_audit(event: Event) -> bool:
    return isinstance(event, msg.Failed) and event.command == msg.Audit.kind


def _some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
