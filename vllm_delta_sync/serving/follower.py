"""Watches a bucket for new versions: the leader rank's polling thread.

Never fetches a shard and never decides what to do with a version; it tells what there is. Polling cannot end:
whatever the store does, it is told and tried again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from vllm_delta_sync.errors import DeltaSyncError, NotFound, RateLimited, VersionGap
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.serving.messages import Message, NothingPublished, PollFailed, Ref, Tip

JITTER = 0.2
LAST_BACK_OFF_S = 60.0


class Follower:
    """Polls one log.

    Args:
        open_log: opens the log anew; raises NotFound while nothing is published.
        tell: takes Tip, NothingPublished and PollFailed.
        must_exist: whether a log that is not there is a failure, not one that has yet to begin.
        interval_s: seconds between two polls, ± 20 %.
    """

    def __init__(
        self,
        open_log: Callable[[], DeltaLog],
        tell: Callable[[Message], None],
        interval_s: float,
        *,
        must_exist: bool = False,
    ) -> None:
        self._open_log = open_log
        self._tell = tell
        self._interval_s = interval_s
        self._must_exist = must_exist
        self._log: DeltaLog | None = None
        self._tip: Ref | None = None
        self._failures = 0
        self._said_nothing = False
        self._stopped = threading.Event()

    def run(self) -> None:
        """Poll until `stop`."""
        while not self._stopped.wait(self.poll()):
            pass

    def stop(self) -> None:
        self._stopped.set()

    def poll(self) -> float:
        """Look once; returns the seconds to wait before looking again."""
        try:
            self._look()
        except NotFound as error:
            if self._log is not None or self._must_exist:
                return self._failed(error)
            if not self._said_nothing:
                self._tell(NothingPublished())
                self._said_nothing = True
        except DeltaSyncError as error:
            return self._failed(error)
        except Exception as error:  # a store's client may raise anything; a server must not stop following for it
            return self._failed(DeltaSyncError(f"{type(error).__name__}: {error}"))
        self._failures = 0
        return self._interval_s * random.uniform(1 - JITTER, 1 + JITTER)

    def _look(self) -> None:
        log = self._open_log()
        if self._log is not None and log.run != self._log.run:
            raise VersionGap(
                f"the bucket's current run is now {log.run}, this server follows {self._log.run} and stays with it; "
                "restart the server on the new run's base to follow that one"
            )
        self._log = log
        latest = self._log.latest()
        if self._tip is not None and latest.sha256 == self._tip.sha256:
            return
        if self._tip is not None and latest.version <= self._tip.version:
            raise VersionGap(
                f"LATEST went back from version {self._tip.version} to {latest.version}, or to another "
                f"branch; still following {self._tip.version}"
            )
        refs = self._refs_up_to(Ref(latest.version, latest.manifest, latest.sha256))
        self._tip = refs[-1]
        self._tell(Tip(latest.run, latest.version, tuple(refs)))

    def _refs_up_to(self, tip: Ref) -> list[Ref]:
        """Manifests after the tip known so far, walked by digest from the new one."""
        assert self._log is not None
        refs = [tip]
        while True:
            manifest = self._log.manifest(refs[-1].to_object())
            if manifest.version != refs[-1].version:
                raise VersionGap(f"{refs[-1].key} is version {manifest.version}, {refs[-1].version} was promised")
            if manifest.parent is None:
                break
            if self._tip is not None and manifest.version == self._tip.version + 1:
                if manifest.parent.sha256 != self._tip.sha256:
                    raise VersionGap(
                        f"version {manifest.version} does not follow the version {self._tip.version} "
                        "known here: the log was forked"
                    )
                break
            refs.append(Ref(manifest.version - 1, manifest.parent.key, manifest.parent.sha256))
        return refs[::-1]

    def _failed(self, error: DeltaSyncError) -> float:
        self._failures += 1
        self._tell(PollFailed(error.cause, str(error)))
        if isinstance(error, RateLimited):
            return error.retry_after + 1.0
        limit = min(self._interval_s * 2 ** min(self._failures, 16), LAST_BACK_OFF_S)
        return random.uniform(min(self._interval_s, limit), max(limit, self._interval_s))
