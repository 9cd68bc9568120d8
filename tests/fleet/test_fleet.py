"""Many followers on one stand-in Hub: all get to the tip, within the quota of a free account and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    seconds: float


def run(followers: int, processes: int, versions: int, interval_s: float) -> Outcome:
    """A publisher and followers, all at once."""
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
        share = str(followers // processes)
        fleet = [start(str(HERE / "follow.py"), uri, share) for _ in range(processes)]
        largest = int(trainer.communicate()[0])
        found = [json.loads(process.communicate()[0]) for process in fleet]
        counts, seconds = hub.counts(), time.monotonic() - begin
    return Outcome(
        versions=[version for one in found for version in one["versions"]],
        failures=[failure for one in found for failure in one["failures"]],
        largest=largest,
        grown=max(one["grown"] for one in found),
        counts=counts,
        seconds=seconds,
    )


def check(outcome: Outcome, followers: int, processes: int, versions: int) -> None:
    assert outcome.failures == []
    assert outcome.versions == [versions] * followers
    share = followers // processes
    # The client's own part, and for each follower what it holds at a time: stored and unpacked, of one hop.
    assert outcome.grown < 64e6 + share * 8 * outcome.largest
    assert outcome.largest * 20 < MODEL_BYTES, "too few bytes to tell a delta from a model"


def test_a_few_followers_of_one_hub_get_to_the_tip() -> None:
    outcome = run(followers=6, processes=2, versions=8, interval_s=1.0)
    check(outcome, 6, 2, 8)
    # After one look at LATEST everything is fetched by content: no follower asks the Hub for anything else.
    assert outcome.counts["token"] <= 3


@pytest.mark.fleet
def test_fifty_followers_stay_within_the_quota_of_a_free_account() -> None:
    outcome = run(followers=50, processes=5, versions=30, interval_s=2.0)
    print(json.dumps({**vars(outcome), "versions": sorted(set(outcome.versions))}))
    check(outcome, 50, 5, 30)
    for kind, limit in QUOTA.items():
        assert outcome.counts[kind] <= limit * outcome.seconds / 60, (kind, outcome.counts)
