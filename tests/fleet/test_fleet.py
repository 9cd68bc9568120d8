"""Many followers on one stand-in Hub: all get to the tip, within the quota of a free account and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub.process import HubProcess

HERE = Path(__file__).parent
MODEL_BYTES = 8_000_000  # bf16, of walk.ELEMENTS
QUOTA = {"api": 200, "resolver": 1000}  # requests in a minute: a fifth of what a free account has in five


@dataclass(frozen=True)
class Outcome:
    """What a fleet did."""

    versions: list[int]
    failures: list[str]
    largest: int  # bytes of the largest version
    grown: int  # bytes, of the process that grew most
    counts: dict[str, int]  # requests by class and route, of publisher and followers together, over `seconds`
    first_minute: dict[str, int]  # the same of the first minute, or of all if that is less
    seconds: float


def run(followers: int, versions: int, interval_s: float) -> Outcome:
    """A publisher and followers, all at once, each a process."""
    with HubProcess() as hub:
        environment = {**os.environ, **hub.environment, "PYTHONPATH": str(HERE.parents[1])}

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, *arguments]
            pipe = subprocess.PIPE
            return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=None, text=True)

        uri = "hf://buckets/tests/fleet"
        trainer = start(str(HERE / "walk.py"), uri, str(versions), str(interval_s))
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "begun\n"
        hub.control(forget_counts=True)
        begin = time.monotonic()
        fleet = start(str(HERE / "follow.py"), uri, str(followers))
        first_minute: dict[str, int] = {}
        minute = threading.Timer(60.0, lambda: first_minute.update(hub.counts()))
        minute.daemon = True
        minute.start()
        largest = int(trainer.communicate()[0])
        found = [json.loads(line) for line in fleet.communicate()[0].splitlines()]
        counts, seconds = hub.counts(), time.monotonic() - begin
        minute.cancel()
    return Outcome(
        versions=[one["version"] for one in found],
        failures=[failure for one in found for failure in one["failures"]],
        largest=largest,
        grown=max(one["grown"] for one in found),
        counts=counts,
        first_minute=first_minute or counts,
        seconds=seconds,
    )


def check(outcome: Outcome, followers: int, versions: int) -> None:
    assert outcome.failures == []
    assert outcome.versions == [versions] * followers
    # The client's own part, and what a follower holds at a time: stored and unpacked, of one hop.
    assert outcome.grown < 64e6 + 8 * outcome.largest
    assert outcome.largest * 20 < MODEL_BYTES, "too few bytes to tell a delta from a model"


def test_a_few_followers_of_one_hub_get_to_the_tip() -> None:
    outcome = run(followers=4, versions=8, interval_s=1.0)
    check(outcome, 4, 8)
    # After one look at LATEST everything is fetched by content: no follower asks the Hub for anything else.
    assert outcome.counts["token"] <= 4 + 2  # the publisher's two: to write, and to read back


@pytest.mark.fleet
def test_fifty_followers_stay_within_the_quota_of_a_free_account() -> None:
    outcome = run(followers=50, versions=30, interval_s=2.0)
    print(json.dumps({**vars(outcome), "versions": sorted(set(outcome.versions))}))
    check(outcome, 50, 30)
    for kind, limit in QUOTA.items():
        assert outcome.first_minute[kind] <= limit, (kind, outcome.first_minute)
        assert outcome.counts[kind] <= limit * outcome.seconds / 60, (kind, outcome.counts)
