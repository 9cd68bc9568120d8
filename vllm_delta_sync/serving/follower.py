"""Watches a bucket for what LATEST says: the leader rank's polling thread.

Never fetches more than LATEST and RUN, and never decides what to do about them. Polling cannot end: whatever the store
does, also when it never answers, it is told and tried again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_delta_sync.errors import DeltaSyncError, NotFound, RateLimited, Unavailable
from vllm_delta_sync.log import DeltaLog, names
from vllm_delta_sync.log.tail import TipWatch
from vllm_delta_sync.serving.messages import Message, NothingPublished, PollFailed, Tip
from vllm_delta_sync.store.deadline import call_within
from vllm_delta_sync.store.watch import Watchable
from vllm_delta_sync.wire.manifest import LatestPointer

JITTER = 0.2
LAST_BACK_OFF_S = 60.0
RUN_INTERVAL_S = 60.0
MOST_UNANSWERED = 4  # looks that may hang in their threads at once
LEAST_GAP_S = 0.2  # between two looks, however often the store says that something changed
METERED_LOOKS_A_MINUTE = 15.0
"""Looks that events may bring about where each counts against a quota: as many as one every four seconds."""
METERED_BURST = 3.0  # looks that may come at once after a quiet time
FEED_SPREAD_S = 300.0
"""Seconds within which followers of a metered store begin to listen: a fleet that starts must not ask all at once."""


class _Sight:
    """What one connection sees: the current run, and its LATEST by one `head` a look while nothing changes.

    Given up as a whole when a look does not come back, so that a late answer changes nothing.
    """

    def __init__(self, open_log: Callable[[], DeltaLog], clock: Callable[[], float]) -> None:
        self._open_log = open_log
        self._clock = clock
        self._run_due = 0.0
        self._watch: TipWatch | None = None
        self.log: DeltaLog | None = None

    def look(self) -> LatestPointer | None:
        """What LATEST says, unless it is surely what it said at the last look."""
        now = self._clock()
        if self.log is None or self._watch is None or now >= self._run_due:
            log = self._open_log()
            if self.log is None or log.run != self.log.run:
                self.log, self._watch = log, TipWatch(log)
            self._run_due = now + RUN_INTERVAL_S
        assert self._watch is not None
        try:
            return self._watch.look()
        except NotFound:
            self._run_due = now  # perhaps the run is gone, and there is another
            raise


@dataclass(slots=True)
class Looks:
    """How many looks are left of those that events may bring about; a pure function of when looks were taken.

    A look takes one, whatever brought it about, so that events add none to looks that are as frequent already.
    """

    a_minute: float
    left: float = METERED_BURST
    at: float = 0.0  # when `left` was so many, in the seconds of `now`

    def take(self, now: float) -> None:
        """A look is taken."""
        self.left = max(0.0, self._by(now) - 1.0)
        self.at = now

    def wait_s(self, now: float) -> float:
        """Seconds until an event may bring about the next."""
        return max(0.0, 1.0 - self._by(now)) * 60.0 / self.a_minute

    def _by(self, now: float) -> float:
        return min(METERED_BURST, self.left + (now - self.at) * self.a_minute / 60.0)


class Follower:
    """Polls one log.

    Args:
        open_log: opens the current run of the log anew; raises NotFound while nothing is published.
        tell: takes Tip, NothingPublished and PollFailed.
        interval_s: seconds between two polls, ± 20 %.
        must_exist: whether a log that is not there is a failure, not one that has yet to begin.
        deadline_s: seconds after which a look is given up.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        open_log: Callable[[], DeltaLog],
        tell: Callable[[Message], None],
        interval_s: float,
        *,
        must_exist: bool = False,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_log = open_log
        self._tell = tell
        self._interval_s = interval_s
        self._must_exist = must_exist
        self._deadline_s = deadline_s
        self._clock = clock
        self._sight = _Sight(open_log, clock)
        self._told: LatestPointer | None = None
        self._failures = 0
        self._said_nothing = False
        self._unanswered = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._nudge = threading.Event()
        self._feed: _Feed | None = None
        self._looks = Looks(METERED_LOOKS_A_MINUTE, at=clock())

    def run(self) -> None:
        """Poll until `stop`; sooner than the interval when the store says that LATEST changed."""
        while not self._stopped.is_set():
            wait = self.poll()
            least = min(wait, self.least_gap_s())
            self._stopped.wait(least)
            # What failed is given its time, whatever the store says.
            (self._stopped if self._failures else self._nudge).wait(wait - least)
            self._nudge.clear()

    def least_gap_s(self) -> float:
        """Seconds from the look that was just taken to the next, however soon the store says that something changed."""
        now, log = self._clock(), self._sight.log
        self._looks.take(now)
        return max(LEAST_GAP_S, self._looks.wait_s(now)) if log is not None and log.store.metered else LEAST_GAP_S

    def stop(self) -> None:
        self._stopped.set()
        self._nudge.set()
        if self._feed is not None:
            self._feed.stop()

    def poll(self) -> float:
        """Look once; returns the seconds to wait before looking again."""
        try:
            pointer = self._look()
        except NotFound as error:
            if self._told is not None or self._must_exist:
                return self._failed(error)
            if not self._said_nothing:
                self._tell(NothingPublished())
                self._said_nothing = True
        except DeltaSyncError as error:
            return self._failed(error)
        except Exception as error:  # a store's client may raise anything; a server must not stop following for it
            return self._failed(DeltaSyncError(f"{type(error).__name__}: {error}"))
        else:
            self._listen()
            if pointer is not None and pointer != self._told:
                self._told = pointer
                self._tell(Tip(pointer))
        self._failures = 0
        return self._interval_s * random.uniform(1 - JITTER, 1 + JITTER)

    def _look(self) -> LatestPointer | None:
        """In a thread of its own, which is left behind when the store does not answer."""
        if self._unanswered >= MOST_UNANSWERED:
            raise Unavailable(f"the store has not answered {self._unanswered} looks at LATEST, and they still wait")
        sight, ended = self._sight, threading.Event()

        def look() -> LatestPointer | None:
            with self._lock:
                self._unanswered += 1
            try:
                return sight.look()
            finally:
                with self._lock:
                    self._unanswered -= 1
                ended.set()

        try:
            return call_within(self._deadline_s, "looking at LATEST", look)
        finally:
            if not ended.is_set():
                self._sight = _Sight(self._open_log, self._clock)

    def _listen(self) -> None:
        """Have the store say when LATEST of the run in sight changes, if it can."""
        log = self._sight.log
        assert log is not None
        if self._feed is not None and self._feed.log is log:
            return
        if self._feed is not None:
            self._feed.stop()
        self._feed = _Feed(log, self._nudge, random.uniform(0.0, FEED_SPREAD_S) if log.store.metered else 0.0)
        if self._stopped.is_set():  # during this look
            self._feed.stop()

    def _failed(self, error: DeltaSyncError) -> float:
        self._failures += 1
        self._tell(PollFailed(error.cause, str(error)))
        if isinstance(error, RateLimited):
            return error.retry_after + 1.0
        limit = min(self._interval_s * 2 ** min(self._failures, 16), LAST_BACK_OFF_S)
        return random.uniform(min(self._interval_s, limit), max(limit, self._interval_s))


class _Feed:
    """Sets `nudge` whenever the store says that LATEST of a log may have changed; silent where it cannot tell.

    Args:
        delay_s: seconds before it begins to listen.
    """

    def __init__(self, log: DeltaLog, nudge: threading.Event, delay_s: float) -> None:
        self.log = log
        self._nudge = nudge
        self._delay_s = delay_s
        self._stopped = threading.Event()
        if isinstance(log.store, Watchable):
            threading.Thread(target=self._run, args=(log.store,), name="delta-sync-feed", daemon=True).start()

    def _run(self, store: Watchable) -> None:
        self._stopped.wait(self._delay_s)
        for _ in store.changes(names.LATEST, self._stopped):
            if not self._stopped.is_set():
                self._nudge.set()

    def stop(self) -> None:
        self._stopped.set()
