"""Where a server goes: pins forwards and backwards, rewinds, forks, dead ends, and another run."""

from __future__ import annotations

import pytest

from tests.unit.serving.orders import (
    LAYOUTS,
    OTHER,
    RUN,
    SPECS,
    TENSOR_LANES,
    hop,
    joined,
    latest,
    make,
    place,
    plan,
    prove,
    ref,
    root,
    stage,
    take,
    tell,
    tip,
)  # fmt: skip
from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.serving import course
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import Adopt, Commit, Committed, Send, Tick, Trace, Traced
from vllm_delta_sync.serving.controller import Controller
from vllm_delta_sync.serving.retrying import FIRST_RETRY_S, LAST_RETRY_S
from vllm_delta_sync.serving.state import Phase


@pytest.mark.parametrize(
    ("tip_version", "pin", "served", "leads"),
    [
        (5, None, 3, True),
        (5, None, 5, False),
        (5, None, 7, False),  # LATEST went back: only a pin may take a server there
        (5, 3, 5, True),
        (5, 3, 1, True),
        (5, 3, 3, False),
        (5, 3, 7, True),
        (5, None, None, True),
        (5, 3, None, True),
    ],
)
def test_a_server_moves_towards_its_goal_and_backwards_only_under_a_pin(
    tip_version: int, pin: int | None, served: int | None, leads: bool
) -> None:
    held = None if served is None else place(served)
    assert course.leads_on(latest(tip_version, pin=pin), held) is leads


@pytest.mark.parametrize(
    ("before", "now", "served", "said"),
    [
        (latest(5), latest(6), 5, None),
        (None, latest(6), 0, None),
        (latest(5), latest(5, pin=2), 5, None),
        (latest(5, pin=2), latest(5), 2, None),
        (latest(5), latest(3), 5, "went back from version 5 to 3"),
        (latest(5), latest(3), 2, "went back from version 5 to 3"),
        (None, latest(3), 4, "went back from version 4 to 3"),
        (latest(4), latest(5, branch=1), 5, "forked"),
        (latest(5), latest(5), None, None),
    ],
)
def test_what_is_odd_about_latest_is_said(
    before: msg.LatestPointer | None, now: msg.LatestPointer, served: int | None, said: str | None
) -> None:
    odd = course.oddity(before, now, None if served is None else place(served))
    assert odd is None if said is None else odd is not None and said in odd


@pytest.mark.parametrize(
    ("step", "pin", "served", "refused"),
    [
        (hop(3), None, 2, None),
        (hop(2, 5), 2, 5, None),
        (hop(9, 5), 2, 5, None),  # under a pin a way back may lead over the tip
        (hop(9, kind="anchor"), None, 3, None),
        (hop(9, kind="anchor"), None, None, None),
        (hop(3), None, 1, "version 1 is served"),
        (hop(3), None, None, "no version is served"),
        (hop(2, 5), None, 5, "only a pin"),
        (hop(2, kind="anchor"), None, 5, "only a pin"),
    ],
)
def test_a_planned_step_begins_where_the_server_is_and_goes_where_it_may(
    step: msg.Hop, pin: int | None, served: int | None, refused: str | None
) -> None:
    held = None if served is None else place(served)
    if refused is None:
        course.check_step(step, latest(9, pin=pin), held)
    else:
        with pytest.raises(VersionGap, match=refused):
            course.check_step(step, latest(9, pin=pin), held)


@pytest.mark.parametrize(
    ("step", "held", "refused"),
    [
        (hop(3), place(2), None),
        (hop(8, 0), place(0), None),
        (hop(2, 5), place(5), None),
        (hop(8, kind="anchor"), None, None),
        (hop(3), None, "weights of no version"),
        (hop(3), place(3), "begins at version 2"),
        (hop(3), msg.Place(2, ref(2, branch=1), root(2)), "its parent is"),
        (hop(8, 0), msg.Place(0, ref(0), root(1)), "begins at state root"),
    ],
)
def test_a_rank_refuses_a_step_that_does_not_begin_at_what_it_holds(
    step: msg.Hop, held: msg.Place | None, refused: str | None
) -> None:
    if refused is None:
        course.require_follows(step, held)
    else:
        with pytest.raises(VersionGap, match=refused):
            course.require_follows(step, held)


def follow(controller: Controller, *steps: int) -> None:
    for version in steps:
        take(controller, hop(version))


def test_a_pin_takes_the_server_back_and_its_end_to_the_tip() -> None:
    controller = make()
    joined(controller, latest=3)
    follow(controller, 1, 2, 3)
    assert tell(controller, tip(3, pin=1), 1.0) == [plan(3, version=3, pin=1)]
    assert take(controller, hop(1, 3)) == []
    status = controller.status
    assert (status.served, status.latest, status.pin, status.goal, status.lag) == (1, 3, 1, 1, 0)
    assert tell(controller, tip(4, pin=1), 2.0) == []  # the trainer goes on, the server stays
    assert tell(controller, tip(4), 3.0) == [plan(1, version=4)]
    assert take(controller, hop(4, 1)) == []
    assert (status.served, status.pin, status.lag) == (4, None, 0)
    assert status.failures == {}


def test_a_pin_that_comes_while_a_step_is_staged_is_followed_after_its_commit() -> None:
    controller = make()
    joined(controller, latest=3)
    assert stage(controller, hop(3, 0)) == [Commit(RUN, 3)]
    assert tell(controller, tip(3, pin=1), 0.5) == []
    assert tell(controller, Committed(3, 0.01), 1.0) == [plan(3, version=3, pin=1)]


def test_a_pin_does_not_wait_for_what_failed_before_it() -> None:
    controller = make()
    joined(controller, latest=3)
    tell(controller, msg.Planned(hop(1)), 0.0)
    tell(controller, msg.Failed("stage", 1, "unavailable", "x"), 0.0)
    assert tell(controller, tip(3, pin=1), 0.1) == [plan(0, version=3, pin=1)]


def test_a_start_under_a_pin_is_settled_when_the_pinned_version_is_served() -> None:
    controller = make()
    joined(controller, at=3, latest=3, pin=1)
    assert not controller.status.settled
    take(controller, hop(1, 3))
    assert controller.status.settled


def test_a_latest_that_went_back_is_named_and_nothing_moves_until_it_is_ahead_again() -> None:
    controller = make()
    joined(controller, at=5, latest=5)
    assert tell(controller, tip(3), 1.0) == [] and controller.status.served == 5
    assert controller.status.failures == {"version_gap": 1} and "went back" in str(controller.status.last_error)
    assert controller.status.lag == 2
    assert tell(controller, tip(6), 2.0) == [plan(5, version=6)]


def test_no_way_to_the_goal_is_named_and_asked_for_again_when_latest_says_something_new() -> None:
    controller = make()
    joined(controller, latest=5)
    failure = msg.Failed("plan", None, "version_gap", "deltas 1 to 3 are gone")
    assert tell(controller, failure, 0.0) == [Send(msg.Drop())]
    assert controller.status.served == 0 and controller.status.failures == {"version_gap": 1}
    assert tell(controller, Tick(), FIRST_RETRY_S / 2) == []
    assert tell(controller, tip(6), FIRST_RETRY_S / 2) == [plan(0, version=6)]  # perhaps with a new fold
    assert take(controller, hop(6, kind="anchor")) == []
    (record,) = controller.status.commits
    assert (record.hop, record.source, record.version) == ("anchor", 0, 6)
    assert record.changed == 14  # what both ranks wrote: an anchor does not say how much differs


def test_a_step_back_that_no_pin_asked_for_is_not_taken() -> None:
    controller = make()
    joined(controller, at=5, latest=9)
    assert tell(controller, msg.Planned(hop(4, kind="anchor")), 0.0) == [Send(msg.Drop())]
    assert controller.status.failures == {"version_gap": 1} and controller.status.phase is Phase.FOLLOWING


def rebase(controller: Controller, at: int | None, version: int = 0) -> list[object]:
    """The bucket goes on to another run, whose tensors are the same."""
    told = tell(controller, tip(version, run=OTHER), 5.0)
    assert told == [Send(msg.LoadBase(OTHER, ref(0)))]
    assert tell(controller, msg.BaseLoaded(True), 5.0, 0) == []
    assert tell(controller, msg.BaseLoaded(True), 5.0, 1) == [Send(msg.Prove())]  # nothing is traced again
    return list(prove(controller, at))


def test_another_run_that_goes_on_from_what_is_served_is_joined_without_a_step() -> None:
    controller = make()
    joined(controller, at=3, latest=3)
    assert rebase(controller, at=0) == [Adopt(OTHER, 0)]
    status = controller.status
    assert (status.run, status.served_run, status.served, status.run_changes) == (OTHER, OTHER, 0, 1)
    assert tell(controller, tip(1, run=OTHER), 6.0) == [plan(0, version=1, run=OTHER)]
    assert take(controller, hop(1), OTHER) == []


def test_another_run_with_other_tensors_is_traced_anew() -> None:
    controller = make()
    joined(controller)
    tell(controller, tip(0, run=OTHER), 5.0)
    tell(controller, msg.BaseLoaded(True), 5.0, 0)
    assert tell(controller, msg.BaseLoaded(False), 5.0, 1) == [Trace(0)]
    assert tell(controller, Traced(0, SPECS, LAYOUTS), 5.0) == [Send(msg.Prove())]


def test_another_run_that_begins_elsewhere_is_reached_by_its_anchor() -> None:
    controller = make()
    joined(controller, at=3, latest=3)
    assert rebase(controller, at=None, version=2) == [plan(None, version=2, run=OTHER)]
    assert (controller.status.served_run, controller.status.served, controller.status.lag) == (RUN, 3, None)
    assert take(controller, hop(1, kind="anchor"), OTHER) == [plan(1, version=2, run=OTHER)]
    assert (controller.status.served_run, controller.status.served) == (OTHER, 1)
    assert controller.status.failures == {}


def test_another_run_that_cannot_be_reached_is_named_and_tried_again_while_the_old_one_is_served() -> None:
    controller = make()
    joined(controller, at=3, latest=3)
    rebase(controller, at=None)
    failure = msg.Failed("plan", None, "version_gap", "there is no anchor")
    assert tell(controller, failure, 5.0) == [Send(msg.Drop())]
    status = controller.status
    assert (status.phase, status.served_run, status.served) == (Phase.FOLLOWING, RUN, 3)
    assert status.failures == {"base_mismatch": 1} and "'proj' differs" in str(status.last_error)
    assert tell(controller, Tick(), 5.0 + LAST_RETRY_S) == [plan(None, version=0, run=OTHER)]
    assert tell(controller, tip(0), 99.0) == []  # it waits for the plan under way
    tell(controller, failure, 99.0)
    assert tell(controller, Tick(), 200.0) == [Send(msg.LoadBase(RUN, ref(0)))]  # and the old run is back


def test_a_server_started_on_other_weights_recovers_by_an_anchor_or_says_at_once_that_it_cannot() -> None:
    controller = make()
    assert joined(controller, at=None, latest=4) == [plan(None, version=4)]
    assert take(controller, hop(4, kind="anchor")) == [] and controller.status.settled
    (record,) = controller.status.commits
    assert record.source is None
    other = make()
    joined(other, at=None, latest=4)
    assert tell(other, msg.Failed("plan", None, "version_gap", "no anchor"), 0.0) == []
    assert other.status.phase is Phase.HALTED and other.status.failures == {"base_mismatch": 1}


def test_a_store_that_fails_while_the_way_from_other_weights_is_looked_for_halts_nothing() -> None:
    controller = make()
    joined(controller, at=None, latest=4)
    tell(controller, msg.Failed("plan", None, "unavailable", "x"), 0.0)
    assert tell(controller, Tick(), FIRST_RETRY_S) == [plan(None, version=4)]


def test_a_run_that_changes_while_another_is_joined_is_joined_next() -> None:
    controller = make()
    joined(controller, at=3, latest=3)
    tell(controller, tip(0, run=OTHER), 5.0)
    assert tell(controller, tip(4), 5.1) == []
    for rank in (0, 1):
        tell(controller, msg.BaseLoaded(True), 5.0, rank)
    assert prove(controller, 0) == [Adopt(OTHER, 0), Send(msg.LoadBase(RUN, ref(0)))]
    assert controller.status.run_changes == 2


def test_a_re_base_that_fails_half_way_is_begun_from_its_beginning() -> None:
    controller = make()
    joined(controller, at=3, latest=3)
    tell(controller, tip(0, run=OTHER), 5.0)
    tell(controller, msg.Failed("load_base", None, "unavailable", "x"), 5.0, 1)
    assert tell(controller, tip(3), 5.1) == [Send(msg.LoadBase(RUN, ref(0)))]  # also back to the run it came from


def test_an_audit_of_the_run_before_is_not_heard_any_more() -> None:
    controller = make()
    joined(controller, at=3, latest=3)
    tell(controller, msg.WantAudit(), 1.0)
    tell(controller, tip(0, run=OTHER), 5.0)
    assert tell(controller, msg.WantAudit(), 5.0) == []  # there is nothing to hold the weights against
    for rank in (0, 1):
        assert tell(controller, msg.Audited(1, 3, ("proj",), TENSOR_LANES, 0.1), 5.1, rank) == []
    assert controller.status.phase is Phase.JOINING and controller.status.audit is None
    for rank in (0, 1):
        tell(controller, msg.BaseLoaded(True), 5.0, rank)
    prove(controller, 0)
    assert tell(controller, msg.WantAudit(), 6.0) == [Send(msg.Audit(2))]
