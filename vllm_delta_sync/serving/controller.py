"""Decides what an engine does next: a pure state machine from events to actions.

No I/O, no clock and no thread (`loop` has them): every event carries its time, so that each decision can be tested as a
table. Whatever is given up gets a new attempt number, and answers that carry an older one are not heard.
"""

from __future__ import annotations

from vllm_delta_sync import errors
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.serving import course, retrying
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
from vllm_delta_sync.serving.attempts import Attempts
from vllm_delta_sync.serving.audits import Audits
from vllm_delta_sync.serving.joining import Joining
from vllm_delta_sync.serving.messages import Place
from vllm_delta_sync.serving.proof import some
from vllm_delta_sync.serving.retrying import Retrying
from vllm_delta_sync.serving.state import CommitRecord, Phase, Status
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer

LEADER = 0


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
        self._stop_on_error = stop_on_error
        self._audits = Audits(ranks, audit_every)
        self._pointer: LatestPointer | None = None  # what LATEST says
        self._joining = Joining(ignore_unmapped=ignore_unmapped)
        self._run: str | None = None  # whose books the ranks keep
        self._place: Place | None = None  # the version of that run that they hold; None: weights of no version
        self._planned_by: LatestPointer | None = None
        self._hop: Hop | None = None
        self._attempts = Attempts(ranks)
        self._retrying = Retrying()

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
        if self._attempts.is_late(event):
            return []
        match event:
            case msg.Tip():
                return self._tip(event.pointer)
            case msg.NothingPublished():
                self.status.empty = True
                return []
            case msg.PollFailed():
                return self._note(event.cause, event.text)
            case msg.BaseLoaded():
                return self._base_loaded() if self._attempts.complete(event, rank) else []
            case Traced():
                return self._traced(event)
            case msg.Proved():
                if not self._attempts.complete(event, rank):
                    return []
                return [self._attempts.begin(self._joining.proved(self._attempts.replies), LEADER)]
            case msg.Located():
                return [self._attempts.begin(self._joining.located(event))]
            case msg.Holding():
                return self._joined() if self._attempts.complete(event, rank) else []
            case msg.Planned():
                return self._planned(event.hop)
            case msg.Staged():
                return self._staged() if self._attempts.complete(event, rank) else []
            case Committed():
                return self._committed(event, now)
            case EngineFailed():
                return self._halt(event.cause, event.text)
            case msg.Failed(command) if command == msg.Audit.kind:
                failed = self._audits.failed(event)
                return self._note(event.cause, f"audit on rank {rank}: {event.text}") if failed else []
            case msg.Failed():
                return self._failed(event, rank, now)
            case msg.Lost():
                return self._halt("rank_lost", f"rank {rank} left: {event.text}")
            case msg.Audited():
                return self._audited(event, rank)
            case msg.WantAudit():
                return self._audit()
            case Tick():
                return self._proceed() if self._retrying.due(now) else []
        raise AssertionError(f"unexpected event {event!r}")

    def _bystand(self, event: Event, now: float) -> list[Action]:
        """Halted: keep telling how far behind it is, and how a commit under way ended."""
        if isinstance(event, msg.Tip):
            self.status.see(event.pointer)
        elif isinstance(event, Committed) and event.error is None:
            self._record(event, now)
        elif isinstance(event, Committed) and not event.trusted:
            return self._poisoned(event)
        return []

    # --- LATEST ------------------------------------------------------------------------------------------------------
    def _tip(self, new: LatestPointer) -> list[Action]:
        old, self._pointer = self._pointer, new
        self.status.see(new)
        same_run = old if old is not None and old.run == new.run else None
        odd = course.oddity(same_run, new, self._place if self._run == new.run else None)
        if odd is not None:
            self._note(errors.VersionGap.cause, odd)
        turned = old is not None and (new.run, new.pin) != (old.run, old.pin)
        self._retrying.latest_changed(other_goal=turned)
        return self._proceed()

    def _proceed(self) -> list[Action]:
        """Begin what is to be done next, unless something is under way or waits to be tried again."""
        if self._retrying.waiting or self.status.phase not in (Phase.WAITING, Phase.FOLLOWING):
            return []
        if self._pointer is None:
            return []
        return self._advance() if self._run == self._pointer.run else self._join()

    # --- joining -----------------------------------------------------------------------------------------------------
    def _join(self) -> list[Action]:
        assert self._pointer is not None
        self._audits.void()
        self.status.phase = Phase.JOINING
        self._run, self._place = None, None
        return [self._attempts.begin(self._joining.begin(self._pointer))]

    def _base_loaded(self) -> list[Action]:
        command = self._joining.base_loaded(self._attempts.replies.values())
        return [Trace(self._attempts.number) if command is None else self._attempts.begin(command)]

    def _traced(self, event: Traced) -> list[Action]:
        command = self._joining.traced(event)
        self.status.unmapped = self._joining.proof.unmapped
        return [self._attempts.begin(command)]

    def _joined(self) -> list[Action]:
        holding = self._attempts.replies[LEADER]
        assert isinstance(holding, msg.Holding)
        self._run, self._place = self._joining.run, holding.place
        if self._place is None:  # what is served stays what it was
            self._succeed()
            return self._proceed()
        self._audits.start_from(self._place.version)
        self.status.serve(self._run, self._place.version)
        self._succeed()
        return [Adopt(self._run, self._place.version), *self._proceed()]

    # --- following ---------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Action]:
        pointer, place = self._pointer, self._place
        assert pointer is not None
        if not course.leads_on(pointer, place):
            return []
        self.status.phase, self._planned_by = Phase.PLANNING, pointer
        refused = self._retrying.take_refused()
        failed, too_large = (refused.hop, refused.too_large) if refused else (None, False)
        return [self._attempts.begin(msg.Plan(pointer, place, failed, too_large), LEADER)]

    def _planned(self, hop: Hop) -> list[Action]:
        assert self._planned_by is not None
        course.check_step(hop, self._planned_by, self._place)
        self.status.phase, self._hop = Phase.STAGING, hop
        return [self._attempts.begin(msg.Stage(hop))]

    def _staged(self) -> list[Action]:
        assert self._hop is not None and self._run is not None
        replies = self._attempts.staged()
        for rank, reply in enumerate(replies):
            if reply.cache_failure is not None:  # it was fetched all the same
                self._note(errors.CacheError.cause, f"rank {rank}: {reply.cache_failure}")
        self._joining.proof.check_staged(replies)
        self.status.phase = Phase.COMMITTING
        return [Commit(self._run, self._hop.to)]

    def _committed(self, event: Committed, now: float) -> list[Action]:
        if event.error is not None:
            cause, text = event.error
            if event.trusted:
                return self._refuse(cause, text, now)
            return self._poisoned(event)
        self._record(event, now)
        self._succeed()
        return [*(self._audit() if self._audits.due(event.version) else []), *self._proceed()]

    def _poisoned(self, event: Committed) -> list[Action]:
        assert event.error is not None
        self._note(*event.error)
        text = f"version {event.version} could not be rolled back: {event.error[1]}"
        return self._end(Phase.POISONED, errors.Poisoned.cause, text)

    def _succeed(self) -> None:
        self.status.phase = Phase.WAITING if self.status.served is None else Phase.FOLLOWING
        self._retrying.succeeded()

    def _record(self, event: Committed, now: float) -> None:
        hop, run = self._hop, self._run
        assert hop is not None and run is not None
        source = self._place.version if self._place else None
        self.status.committed += 1
        self.status.commits.append(CommitRecord.of(hop, source, self._attempts.staged(), event.seconds, now))
        self._place = Place(hop.to, hop.target, hop.after)
        self.status.serve(run, hop.to)

    # --- audits ------------------------------------------------------------------------------------------------------
    def _audit(self) -> list[Action]:
        command = None if self._place is None else self._audits.begin()
        self.status.audits = self._audits.number
        return [] if command is None else [Send(command)]

    def _audited(self, event: msg.Audited, rank: int) -> list[Action]:
        record = self._audits.take(event, rank, self._joining.proof)
        if record is None:
            return []
        self.status.audit = record
        if record.wrong:
            return self._halt(
                "audit",
                f"{len(record.wrong)} live tensors are not what was committed, something else writes to them: "
                f"{some(record.wrong)}",
            )
        return []

    # --- trouble -----------------------------------------------------------------------------------------------------
    def _failed(self, event: msg.Failed, rank: int, now: float) -> list[Action]:
        if event.command != msg.Plan.kind or event.cause != errors.VersionGap.cause:
            actions = self._refuse(event.cause, f"rank {rank}: {event.text}", now)
            self._retrying.not_before(now + event.patience_s)
            return actions
        self._retrying.no_way()
        if self._place is not None:
            return self._refuse(event.cause, event.text, now)
        if self.status.served is None:
            return self._halt(errors.BaseMismatch.cause, self._joining.mismatch)
        text = f"{self._joining.mismatch}; and {event.text}; still serving run {self.status.served_run}"
        return self._retry_later(errors.BaseMismatch.cause, text, now)

    def _refuse(self, cause: str, text: str, now: float) -> list[Action]:
        """Serve on what is served, and try again later unless trying again cannot help."""
        if retrying.is_final(cause, joining=self.status.phase is Phase.JOINING):
            return self._halt(cause, text)
        return self._retry_later(cause, text, now)

    def _retry_later(self, cause: str, text: str, now: float) -> list[Action]:
        self._note(cause, text)
        if self.status.phase is Phase.STAGING and self._hop is not None:
            self._retrying.step_failed(self._hop, cause)
        self.status.phase = Phase.WAITING if self.status.served is None else Phase.FOLLOWING
        self._retrying.put_off(now)
        return [self._attempts.begin(msg.Drop())]

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
        self.status.last_error, self.status.last_cause = f"{cause}: {text}", cause
        return []
