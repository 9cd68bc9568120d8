"""Drives the controller: one thread that takes events, carries out actions and writes the status file.

What must happen between two steps goes through a `Gate` to the engine thread; nothing here runs on that thread while
nothing is new.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

from vllm_delta_sync.serving.actions import Action, Adopt, Commit, Committed, Event, Send, Stop, Tick, Trace
from vllm_delta_sync.serving.channel import Hub
from vllm_delta_sync.serving.controller import Controller
from vllm_delta_sync.serving.messages import Holding
from vllm_delta_sync.serving.state import Phase
from vllm_delta_sync.serving.status import StatusFile

logger = logging.getLogger("vllm.delta_sync")

TICK_S = 0.5


class EngineOps(Protocol):
    """What the engine thread can do for the controller; trace and commit return how it went."""

    def trace(self, attempt: int) -> Event: ...

    def adopt(self, run: str, version: int) -> None: ...

    def commit(self, run: str, version: int) -> Event: ...

    def stop(self, text: str) -> NoReturn: ...


class Gate:
    """Hands work to the engine thread, which runs it between two steps.

    Args:
        ops: the work itself.
        wake: makes the engine thread call `run_pending` soon (for instance by an item in its input queue).
        report: takes the event that each piece of work ends with.
    """

    def __init__(self, ops: EngineOps, wake: Callable[[], None], report: Callable[[Event], None]) -> None:
        self._ops = ops
        self._wake = wake
        self._report = report
        self._pending: deque[Action] = deque()
        self.arrived = threading.Event()
        self.seconds = 0.0  # CPU time of the engine thread that went into all of it

    def submit(self, action: Action) -> None:
        self._pending.append(action)
        self.arrived.set()
        self._wake()

    def run_pending(self) -> None:
        """On the engine thread only."""
        self.arrived.clear()
        begin = time.thread_time()
        while self._pending:
            match self._pending.popleft():
                case Trace(attempt):
                    self._report(self._ops.trace(attempt))
                case Commit(run, version):
                    self._report(self._ops.commit(run, version))
                case Adopt(run, version):
                    self._ops.adopt(run, version)
                case Stop(text):
                    self._ops.stop(text)
        self.seconds += time.thread_time() - begin


class Loop:
    """The controller's thread.

    Args:
        controller: decides.
        status_file: where the world reads how things stand.
    """

    def __init__(self, controller: Controller, status_file: StatusFile) -> None:
        self._controller = controller
        self._status_file = status_file
        self._events: queue.Queue[tuple[int, Event] | None] = queue.Queue()
        self.hub = Hub(lambda rank, message: self._events.put((rank, message)))
        self.settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delta-sync-controller", daemon=True)
        self._gate: Gate | None = None

    def start(self, gate: Gate) -> None:
        self._gate = gate
        self._thread.start()

    def report(self, event: Event) -> None:
        self._events.put((0, event))

    def stop(self) -> None:
        self._events.put(None)
        self.hub.close()  # first, for the thread may be sending to a rank that does not read
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        self._status_file.remove()

    @property
    def last_error(self) -> str | None:
        return self._controller.status.last_error

    def _run(self) -> None:
        self._publish()
        due = time.monotonic() + TICK_S
        while True:
            try:
                item = self._events.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                item, due = (0, Tick()), time.monotonic() + TICK_S
            if item is None:
                return
            rank, event = item
            try:
                self._take(rank, event)
            except Exception:
                # A defect here must not take the server with it: it serves on, and says that it follows no more.
                logger.exception("delta-sync: internal error on %s", type(event).__name__)
                for action in self._controller.give_up("internal", f"on {type(event).__name__}; see the log"):
                    self._carry_out(action)
                self._publish()

    def _take(self, rank: int, event: Event) -> None:
        before = self._fingerprint()
        failures = sum(self._controller.status.failures.values())
        for action in self._controller.handle(event, time.time(), rank):
            self._carry_out(action)
        if self._fingerprint() != before:
            self._tell(event, failed=sum(self._controller.status.failures.values()) > failures)
            self._publish()

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send):
            if action.rank is None:
                self.hub.broadcast(action.message)
            else:
                self.hub.send(action.rank, action.message)
            return
        assert self._gate is not None
        self._gate.submit(action)

    def _fingerprint(self) -> tuple[object, ...]:
        status = self._controller.status
        return (
            status.phase,
            status.served,
            status.run,
            status.latest,
            status.pin,
            status.empty,
            sum(status.failures.values()),
            status.audit,
            status.audits,
        )

    def _tell(self, event: Event, *, failed: bool) -> None:
        status = self._controller.status
        if isinstance(event, Committed) and event.error is None:
            record = status.commits[-1]
            logger.info(
                "delta-sync: serving version %d (step %s) by %s: %d elements changed, fetched %.2f MB in %.3f "
                "s, staged in %.3f s, committed in %.1f ms",
                record.version, record.step, record.hop, record.changed, record.fetched_bytes / 1e6,
                record.fetch_seconds, record.stage_seconds, record.commit_seconds * 1e3,
            )  # fmt: skip
        elif isinstance(event, Holding) and event.place is not None:
            logger.info(
                "delta-sync: the weights are proven to be version %d of run %s", event.place.version, status.run
            )
        elif isinstance(event, Holding):
            logger.warning("delta-sync: the weights are of no version of run %s; looking for an anchor", status.run)
        elif status.phase in (Phase.HALTED, Phase.POISONED):
            logger.error(
                "delta-sync: %s, still serving version %s: %s", status.phase.value, status.served, status.last_error
            )
        elif failed:
            logger.warning("delta-sync: still serving version %s: %s", status.served, status.last_error)

    def _publish(self) -> None:
        self._status_file.write(self._controller.status)
        if self._controller.status.settled:
            self.settled.set()
        else:
            self.settled.clear()
