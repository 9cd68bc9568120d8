"""The background of a publisher: versions in flight, made durable one after the other by one thread.

Does not know what a version is made of, retries nothing and undoes nothing: after a failure it stands still until
the versions in flight are taken back by the caller.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from vllm_delta_sync.errors import PublishError
from vllm_delta_sync.trainer.frozen import FrozenState
from vllm_delta_sync.trainer.publication import Published
from vllm_delta_sync.trainer.snapshot import Delta

logger = logging.getLogger(__name__)


def _outcome() -> Future[Published]:
    """An outcome that nobody can cancel, as `asyncio.wait_for` would: its version is on its way, whoever waits."""
    outcome: Future[Published] = Future()
    outcome.set_running_or_notify_cancel()
    return outcome


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A version that is not durable yet."""

    version: int
    step: int | None
    metadata: dict[str, str]
    delta: Delta
    state: FrozenState  # right after it
    outcome: Future[Published] = field(default_factory=_outcome)


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """Versions that did not become durable, oldest first, and why the oldest did not."""

    versions: tuple[InFlight, ...]
    error: BaseException


class Pipeline:
    """At most `limit` versions in flight; `write` is called for each in order, in one background thread."""

    def __init__(self, write: Callable[[InFlight], Published], limit: int) -> None:
        self._write = write
        self._limit = limit
        self._changed = threading.Condition()
        self._versions: deque[InFlight] = deque()
        self._error: BaseException | None = None
        self._stopping = False
        # A daemon: a trainer that dies without close() must not hang. What was in flight is published after a resume.
        self._thread = threading.Thread(target=self._run, name="delta-sync-publish", daemon=True)
        self._thread.start()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is the background thread: in a callback of an outcome. It must not wait for itself."""
        return threading.current_thread() is self._thread

    def wait_for_room(self) -> None:
        """Block while `limit` versions are in flight and none has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or len(self._versions) < self._limit)

    def wait_until_done(self) -> None:
        """Block until every version is durable or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._versions)

    def submit(self, version: InFlight) -> None:
        """Queue a version behind those in flight. Behind a failed one it fails too."""
        with self._changed:
            self._changed.notify_all()  # first: nobody moves before the lock is free, and a Ctrl-C may come any time
            self._versions.append(version)
            error = self._error
        if error is not None:
            version.outcome.set_exception(_not_durable(version, error))

    def has(self, version: InFlight) -> bool:
        """Whether `submit` got as far as queueing this version, whatever has become of it since."""
        with self._changed:
            return version in self._versions or version.outcome.done()

    @property
    def failure(self) -> Failure | None:
        """If a version has failed: it and those behind it, until `forget_failure`; else None."""
        with self._changed:
            return None if self._error is None else Failure(tuple(self._versions), self._error)

    def forget_failure(self) -> None:
        """Take out the versions of a failure, after which the pipeline goes on."""
        with self._changed:
            self._versions.clear()
            self._error = None

    def stop(self) -> None:
        """End the thread once nothing is in flight, or at once after a failure. Blocks until it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        # Outcomes are set without the lock, for their callbacks run here; and before the lock's waiters are told, who
        # may look at them at once.
        while (version := self._next()) is not None:
            try:
                published = self._write(version)
            except BaseException as error:  # also a MemoryError: whatever it is, the caller must learn of it
                self._fail(error)
            else:
                _tell(partial(version.outcome.set_result, published))
                with self._changed:
                    self._versions.popleft()
                    self._changed.notify_all()
            del version  # or its symbols would stay in memory until the next one comes

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            failed = tuple(self._versions)
        for version in failed:
            _tell(partial(version.outcome.set_exception, _not_durable(version, error)))
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> InFlight | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._error is None and bool(self._versions)))
            return self._versions[0] if self._error is None and self._versions else None


def _tell(outcome: Callable[[], None]) -> None:
    """Set an outcome. What a callback raises that a Future lets through, sys.exit() say, is the callback's alone."""
    try:
        outcome()
    except BaseException:
        logger.exception("a callback of a publication's outcome failed")


def _not_durable(version: InFlight, error: BaseException) -> PublishError:
    failure = PublishError(f"version {version.version} did not become durable: {error}")
    failure.__cause__ = error
    return failure
