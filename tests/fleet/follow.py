"""Follows a log with many followers that fetch and verify, each on its own: `follow.py URI FOLLOWERS`.

Each polls every five seconds, ± 20 %. Stops when standard input ends, after one last look. Holds no assertions: prints
one JSON object: `versions` that each is at, `fetched` bytes of each, `failures`, and `grown`, the bytes by which the
most memory that the process ever had exceeds what it had before they began.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading
from dataclasses import dataclass, field

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.tail import Tail

POLL_S, JITTER = 5.0, 0.2


@dataclass
class Follower:
    """One follower and its thread."""

    uri: str
    stop: threading.Event
    failures: list[str] = field(default_factory=list)
    tail: Tail | None = None

    def run(self) -> None:
        self.stop.wait(random.uniform(0, POLL_S))
        while not self.stop.wait(self.look()):
            pass
        self.look()

    def look(self) -> float:
        """Follow to the tip; returns the seconds until the next look."""
        try:
            if self.tail is None:
                self.tail = Tail(DeltaLog.open(self.uri), from_base=True)
            self.tail.look()
        except DeltaSyncError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        return random.uniform(1 - JITTER, 1 + JITTER) * POLL_S


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    uri, count = sys.argv[1], int(sys.argv[2])
    stop = threading.Event()
    followers = [Follower(uri, stop) for _ in range(count)]
    before = peak_bytes()
    threads = [threading.Thread(target=follower.run) for follower in followers]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    tails = [follower.tail for follower in followers if follower.tail is not None]
    found = {
        "versions": [tail.version for tail in tails],
        "fetched": [tail.fetched for tail in tails],
        "failures": [failure for follower in followers for failure in follower.failures],
        "grown": peak_bytes() - before,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
