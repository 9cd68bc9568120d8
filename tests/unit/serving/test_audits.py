"""Full passes over live weights come when they are due, and halt an engine whose weights something else writes to."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.serving.orders import hop, joined, make, take, tell  # fmt: skip
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import Send  # fmt: skip
from vllm_delta_sync.serving.state import Phase


def test_an_audit_runs_every_so_many_versions_and_halts_on_a_wrong_tensor() -> None:
    controller = make(audit_every=1)
    joined(controller, latest=1)
    assert Send(msg.Audit(1)) in take(controller, hop(1))
    lanes = np.array([[8] * 4, [1] * 4], dtype=np.uint32)
    tell(controller, msg.Audited(1, 1, (), lanes, 0.1), 2.0, 0)
    tell(controller, msg.Audited(1, 1, ("proj",), lanes, 0.1), 2.0, 1)
    assert controller.status.phase is Phase.HALTED and controller.status.failures == {"audit": 1}
    assert controller.status.audit is not None and controller.status.audit.wrong == ("proj",)


def test_an_audit_that_finds_all_right_gives_the_hash_of_every_tensor() -> None:
    controller = make()
    joined(controller)
    assert tell(controller, msg.WantAudit(), 1.0) == [Send(msg.Audit(1))]
    assert tell(controller, msg.WantAudit(), 1.0) == []  # one at a time
    for rank in (0, 1):
        tell(controller, msg.Audited(1, 0, (), np.array([[8] * 4, [rank + 1] * 4], dtype=np.uint32), 0.1), 2.0, rank)
    audit = controller.status.audit
    assert audit is not None and audit.lanes is not None and audit.lanes.tolist() == [[8] * 4, [3] * 4]
    assert controller.status.phase is Phase.FOLLOWING


def test_an_audit_that_fails_is_noted_and_another_can_be_asked_for() -> None:
    controller = make()
    joined(controller)
    tell(controller, msg.WantAudit(), 1.0)
    assert tell(controller, msg.Failed("audit", None, "internal", "x"), 1.0, 1) == []
    assert controller.status.phase is Phase.FOLLOWING and controller.status.failures == {"internal": 1}
    assert tell(controller, msg.WantAudit(), 2.0) == [Send(msg.Audit(2))]


def test_answers_to_an_audit_that_failed_do_not_count_for_the_next() -> None:
    controller = make()
    joined(controller)
    lanes = [np.array([[8] * 4, [rank + 1] * 4], dtype=np.uint32) for rank in (0, 1)]
    controller.handle(msg.WantAudit(), 1.0)
    controller.handle(msg.Failed("audit", None, "internal", "x", attempt=1), 1.0, 1)
    controller.handle(msg.WantAudit(), 2.0)
    controller.handle(msg.Audited(1, 0, (), lanes[0], 0.1), 3.0, 0)  # took longer than the other rank's failure
    controller.handle(msg.Failed("audit", None, "internal", "x", attempt=1), 3.0, 0)
    assert controller.handle(msg.WantAudit(), 3.0) == [] and controller.status.failures == {"internal": 1}
    controller.handle(msg.Audited(2, 0, (), lanes[1], 0.1), 4.0, 1)
    assert controller.status.audit is None
    controller.handle(msg.Audited(2, 0, (), lanes[0], 0.1), 5.0, 0)
    assert controller.status.audit is not None and controller.status.audit.number == 2


@pytest.mark.parametrize(("every", "hops", "audits"), [(2, [1, 2, 3, 4], 2), (2, [8], 1), (3, [2, 4], 1), (0, [8], 0)])
def test_audits_are_due_by_versions_passed_not_by_steps(every: int, hops: list[int], audits: int) -> None:
    controller = make(audit_every=every)
    joined(controller, latest=9)
    at = 0
    for to in hops:
        actions = take(controller, hop(to, at))
        if Send(msg.Audit(controller.status.audits)) in actions:
            for rank in (0, 1):
                lanes = np.array([[8] * 4, [rank + 1] * 4], dtype=np.uint32)
                tell(controller, msg.Audited(controller.status.audits, to, (), lanes, 0.1), 2.0, rank)
        at = to
    assert controller.status.audits == audits
