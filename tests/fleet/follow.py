"""Follows a log with many followers that fetch and verify, each a process: `follow.py URI FOLLOWERS`.

Each polls every five seconds, ± 20 %. Stops when standard input ends, after one last look. Holds no assertions: each
prints one JSON object on a line: `version` that it is at, `fetched` bytes, `failures`, and `grown`, the bytes by which
the most memory that it ever had exceeds what it had before it began.
"""

from __future__ import annotations

import importlib
import json
import os
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
    """One follower."""

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


def follow(uri: str) -> None:
    """Be one follower until standard input ends, which all processes share and nobody writes to."""
    random.seed()
    before = peak_bytes()
    stop = threading.Event()
    follower = Follower(uri, stop)
    thread = threading.Thread(target=follower.run)
    thread.start()
    os.read(sys.stdin.fileno(), 1)
    stop.set()
    thread.join()
    tail = follower.tail
    found = {
        "version": None if tail is None else tail.version,
        "fetched": 0 if tail is None else tail.fetched,
        "failures": follower.failures,
        "grown": peak_bytes() - before,
    }
    os.write(sys.stdout.fileno(), json.dumps(found).encode() + b"\n")


def main() -> None:
    uri, count = sys.argv[1], int(sys.argv[2])
    # What a follower imports is imported once, before the processes part: it holds no connection, thread or token yet.
    # Not hf_xet, whose import starts a thread: a process that parts while that holds a lock waits for it for ever.
    for module in ("huggingface_hub.utils", "vllm_delta_sync.store.hf"):
        importlib.import_module(module)
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                follow(uri)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
