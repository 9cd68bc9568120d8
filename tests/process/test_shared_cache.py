"""Processes that share a node's cache: one of them downloads, and when it is killed another one goes on."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_log

HELD = {"a": "embed.weight,layers.0.norm", "b": "embed.weight,layers.0.proj", "c": "layers.1.steps"}

Start = Callable[..., "Reader"]


class Reader:
    """One process of `fetch_once.py`, ready to begin."""

    def __init__(self, bucket: Path, cache: Path, tensors: str, stall: int) -> None:
        command = [sys.executable, str(Path(__file__).parent / "fetch_once.py"), str(bucket), str(cache), tensors]
        self.process = subprocess.Popen(
            [*command, str(stall)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hear("ready")

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def go(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def outcome(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def leave(self) -> None:
        self.go()
        assert self.process.wait(20) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def log(tmp_path: Path) -> tiny_log.TinyLog:
    return tiny_log.build(tmp_path / "log", 1)


@pytest.fixture
def start(log: tiny_log.TinyLog, tmp_path: Path) -> Iterator[Start]:
    running: list[Reader] = []

    def start(tensors: str, stall: int = 0) -> Reader:
        running.append(Reader(log.bucket, tmp_path / "cache", tensors, stall))
        return running[-1]

    yield start
    for reader in running:
        reader.kill()


def expected(log: tiny_log.TinyLog, tensors: str) -> dict[str, str]:
    tip = log.log.tip()
    rows = [row for row in log.log.table(tip).blocks if row.spec.name in tensors.split(",")]
    return {str(row): hashlib.sha256(data).hexdigest() for row, data in log.log.blocks(tip, rows)}


def test_readers_that_begin_together_fetch_what_they_need_together_once(log: tiny_log.TinyLog, start: Start) -> None:
    readers = {name: start(tensors) for name, tensors in HELD.items()}
    for reader in readers.values():
        reader.go()
    outcomes = {name: reader.outcome() for name, reader in readers.items()}
    for reader in readers.values():
        reader.leave()
    for name, outcome in outcomes.items():
        assert outcome["blocks"] == expected(log, HELD[name])
        assert outcome["failure"] is None
    (needed,) = {outcome["needed"] for outcome in outcomes.values()}
    assert sum(outcome["fetched"] for outcome in outcomes.values()) <= 1.1 * needed


def test_a_killed_downloader_is_replaced_and_what_it_left_is_removed(
    log: tiny_log.TinyLog, start: Start, tmp_path: Path
) -> None:
    row = max(log.log.table(log.log.tip()).blocks, key=lambda row: row.stored)
    downloader = start(row.spec.name, stall=row.stored)
    others = {name: start(HELD[name]) for name in "bc"}
    downloader.go()
    downloader.hear("stalled")
    left = [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".writing-")]
    assert len(left) == 1
    for reader in others.values():
        reader.go()
    time.sleep(0.5)  # they wait for what the downloader has begun
    assert [reader.process.poll() for reader in others.values()] == [None, None]
    downloader.kill()
    outcomes = {name: reader.outcome() for name, reader in others.items()}
    for reader in others.values():
        reader.leave()
    for name, outcome in outcomes.items():
        assert outcome["blocks"] == expected(log, HELD[name])
        assert outcome["failure"] is None
    # Who asked what is needed before the death of the third fetches for three, who asked after it for two.
    needed = {outcome["needed"] for outcome in outcomes.values()}
    assert sum(outcome["fetched"] for outcome in outcomes.values()) <= sum(needed)
    assert not any(path.exists() for path in left)
