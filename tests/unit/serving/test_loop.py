"""The controller's thread: time passes for it, whatever it hears meanwhile, and it ends, whatever it does then."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.serving.orders import RUN, latest, ref
from tests.unit.serving.test_attached import Ops
from vllm_delta_sync.serving import loop as looping
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import Action, Event, Send, Tick
from vllm_delta_sync.serving.channel import Spoke
from vllm_delta_sync.serving.controller import Controller
from vllm_delta_sync.serving.loop import Gate, Loop
from vllm_delta_sync.serving.status import StatusFile


class Noting(Controller):
    """A controller that notes what it is told."""

    def __init__(self) -> None:
        super().__init__(1, ignore_unmapped=False, stop_on_error=False, audit_every=0)
        self.heard: list[Event] = []

    def handle(self, event: Event, now: float, rank: int = 0) -> list[Action]:
        self.heard.append(event)
        return super().handle(event, now, rank)


def test_time_passes_also_while_latest_changes_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "TICK_S", 0.2)
    controller = Noting()
    loop = Loop(controller, StatusFile(tmp_path / "status" / "engine-0.json", dict))
    loop.start(Gate(Ops(), lambda: None, loop.report))
    try:
        for version in range(50):
            loop.report(msg.Tip(latest(version)))
            time.sleep(0.02)
    finally:
        loop.stop()
    assert sum(isinstance(event, Tick) for event in controller.heard) >= 3


class Talkative(Noting):
    """A controller that tells its rank more than a socket holds."""

    def handle(self, event: Event, now: float, rank: int = 0) -> list[Action]:
        super().handle(event, now, rank)
        self.status.audits += 1
        return [Send(msg.LoadBase(RUN * (1 << 18), ref(0)), 0)]


def test_it_ends_at_once_and_leaves_no_status_while_it_waits_for_a_rank_that_does_not_read(tmp_path: Path) -> None:
    path = tmp_path / "status" / "engine-0.json"
    controller = Talkative()
    loop = Loop(controller, StatusFile(path, dict))
    loop.start(Gate(Ops(), lambda: None, loop.report))
    deaf = Spoke(loop.hub.address, loop.hub.authkey, 0)
    loop.hub.wait_for(1, 5.0)
    loop.report(msg.WantAudit())
    deadline = time.monotonic() + 5
    while not controller.heard and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # until the socket is full
    begin = time.monotonic()
    loop.stop()
    assert time.monotonic() - begin < 3
    loop._thread.join(5)
    assert not loop._thread.is_alive() and not path.exists()
    deaf.close()
