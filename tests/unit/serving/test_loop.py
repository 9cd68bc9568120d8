"""The controller's thread: time passes for it, whatever it hears meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.serving.orders import latest
from tests.unit.serving.test_attached import Ops
from vllm_delta_sync.serving import loop as looping
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import Action, Event, Tick
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
