"""The engine's decisions as tables: what each event leads to, and what is never done."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.serving.orders import (
    LAYOUTS,
    ONE,
    RUN,
    SPECS,
    TENSOR_LANES,
    found,
    hop,
    joined,
    make,
    place,
    plan,
    proved,
    ref,
    stage,
    staged,
    take,
    tell,
    tip,
    whole,
)  # fmt: skip
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import (
    Adopt,
    Commit,
    Committed,
    EngineFailed,
    Send,
    Stop,
    Tick,
    Trace,
    Traced,
)  # fmt: skip
from vllm_delta_sync.serving.retrying import FIRST_RETRY_S
from vllm_delta_sync.serving.state import Phase
from vllm_delta_sync.serving.traced import RankLayout


def test_joining_goes_from_the_first_tip_to_proven_weights() -> None:
    controller = make()
    assert tell(controller, tip(0), 0.0) == [Send(msg.LoadBase(RUN, ref(0)))]
    assert tell(controller, msg.BaseLoaded(False), 0.0, 0) == []
    assert tell(controller, msg.BaseLoaded(False), 0.0, 1) == [Trace(0)]
    assert tell(controller, Traced(0, SPECS, LAYOUTS), 0.0) == [Send(msg.Prove())]
    assert tell(controller, proved(5, 1), 0.0, 0) == []
    (locate,) = tell(controller, proved(5, 2), 0.0, 1)
    assert isinstance(locate, Send) and locate.rank == 0 and isinstance(locate.message, msg.Locate)
    # The replicated norm counts once, the halves of proj add up.
    assert locate.message.lanes.tolist() == [[5] * 4, [3] * 4]
    assert tell(controller, found(0), 0.0) == [Send(msg.Joined(place(0), TENSOR_LANES))]
    assert tell(controller, msg.Holding(place(0)), 0.0, 0) == [] and controller.status.served is None
    assert tell(controller, msg.Holding(place(0)), 0.0, 1) == [Adopt(RUN, 0)]
    assert controller.status.phase is Phase.FOLLOWING and controller.status.served == 0 and controller.status.settled


def test_a_late_joiner_goes_on_from_the_version_it_has() -> None:
    controller = make()
    assert joined(controller, at=1, latest=3) == [Adopt(RUN, 1), plan(1, version=3)]
    assert not controller.status.settled


def test_a_version_is_committed_only_when_every_rank_staged_it() -> None:
    controller = make()
    joined(controller)
    assert tell(controller, tip(1), 0.0) == [plan(0, version=1)]
    assert controller.status.phase is Phase.PLANNING
    assert tell(controller, msg.Planned(hop(1)), 0.0) == [Send(msg.Stage(hop(1)))]
    assert tell(controller, staged(1, 3, 1, (3, 3)), 0.0, 0) == []
    assert tell(controller, staged(1, 3, 2, (3, 3)), 0.0, 1) == [Commit(RUN, 1)]
    assert tell(controller, Committed(1, 0.01), 1.0) == []
    (record,) = controller.status.commits
    assert (record.version, record.source, record.hop, record.step) == (1, 0, "delta", 10)
    assert (record.fetched_bytes, record.changed) == (200, 7)


def test_the_next_step_is_planned_right_after_a_commit_from_the_version_it_led_to() -> None:
    controller = make()
    joined(controller, latest=9)
    assert take(controller, hop(8, 0)) == [plan(8, version=9)]
    assert take(controller, hop(9)) == []
    assert [(record.hop, record.source) for record in controller.status.commits] == [("fold", 0), ("delta", 8)]


@pytest.mark.parametrize(
    ("norms", "projs", "expected", "what"),
    [
        ((3, 3), (1, 2), (3, 4), "'proj'"),  # an element of proj reaches no live weight
        ((3, 3), (1, 2), (2, 3), "'norm'"),
        ((3, 4), (1, 2), (3, 3), "copies of weights differ"),
    ],
)
def test_an_update_that_would_not_come_to_the_published_hash_is_refused(
    norms: tuple[int, int], projs: tuple[int, int], expected: tuple[int, int], what: str
) -> None:
    controller = make()
    joined(controller, latest=1)
    tell(controller, msg.Planned(hop(1)), 0.0)
    tell(controller, staged(1, norms[0], projs[0], expected), 0.0, 0)
    actions = tell(controller, staged(1, norms[1], projs[1], expected), 0.0, 1)
    assert actions == [Send(msg.Drop())]
    assert controller.status.served == 0 and controller.status.failures == {"state_hash": 1}
    assert what in (controller.status.last_error or "")


def test_a_failed_stage_is_tried_again_later_and_later() -> None:
    controller = make()
    joined(controller, latest=1)
    failure = msg.Failed("stage", 1, "unavailable", "no route to the store")
    tell(controller, msg.Planned(hop(1)), 0.0)
    assert tell(controller, failure, 10.0, 1) == [Send(msg.Drop())]
    assert tell(controller, tip(2), 10.0) == []  # a new version does not hurry it
    assert tell(controller, Tick(), 10.0 + FIRST_RETRY_S / 2) == []
    assert tell(controller, Tick(), 10.0 + FIRST_RETRY_S) == [plan(0, version=2)]
    tell(controller, msg.Planned(hop(1)), 0.0)
    tell(controller, failure, 20.0, 1)
    assert tell(controller, Tick(), 20.0 + FIRST_RETRY_S * 1.5) == []
    assert tell(controller, Tick(), 20.0 + FIRST_RETRY_S * 2) == [plan(0, version=2)]
    assert controller.status.failures == {"unavailable": 2} and controller.status.served == 0


def test_a_store_that_asks_for_patience_is_not_asked_before() -> None:
    controller = make()
    joined(controller, latest=1)
    tell(controller, msg.Planned(hop(1)), 0.0)
    tell(controller, msg.Failed("stage", 1, "rate_limited", "slow down", 17.0), 10.0, 1)
    assert tell(controller, Tick(), 26.9) == []
    assert tell(controller, Tick(), 27.0) == [plan(0, version=1)]


@pytest.mark.parametrize(
    ("cause", "named", "too_large"),
    [
        ("digest", True, False),
        ("not_found", True, False),
        ("base_needed", True, False),
        ("staging_limit", True, True),
        ("unavailable", False, False),
    ],
)
def test_around_a_step_that_cannot_be_taken_another_way_is_asked_for_once(
    cause: str, named: bool, too_large: bool
) -> None:
    controller = make()
    joined(controller, latest=8)
    tell(controller, msg.Planned(hop(8, 0)), 0.0)
    tell(controller, msg.Failed("stage", 8, cause, "x"), 0.0, 1)
    assert tell(controller, Tick(), 60.0) == [plan(0, hop(8, 0) if named else None, too_large, version=8)]
    assert take(controller, hop(1)) == [plan(1, version=8)]


def test_a_late_answer_to_a_dropped_stage_changes_nothing() -> None:
    controller = make()
    joined(controller, latest=1)
    tell(controller, msg.Planned(hop(1)), 0.0)
    tell(controller, msg.Failed("stage", 1, "unavailable", "x"), 10.0, 1)
    assert tell(controller, staged(1, 3, 1, (3, 3)), 10.1, 0, late=1) == []
    assert controller.status.phase is Phase.FOLLOWING
    tell(controller, Tick(), 10.0 + FIRST_RETRY_S)
    assert tell(controller, msg.Planned(hop(1)), 12.0, late=3) == []  # of the first try
    tell(controller, msg.Planned(hop(1)), 12.0)
    assert tell(controller, staged(1, 3, 1, (3, 3)), 12.0, 0) == []
    assert tell(controller, staged(1, 3, 2, (3, 3)), 12.0, 1, late=3) == []  # of the first try: not counted
    assert tell(controller, msg.Failed("stage", 1, "digest", "x"), 12.0, 1, late=3) == []
    assert tell(controller, staged(1, 3, 2, (3, 3)), 12.0, 1) == [Commit(RUN, 1)]


def test_a_commit_that_was_rolled_back_is_tried_again() -> None:
    controller = make()
    joined(controller, latest=1)
    stage(controller, hop(1))
    assert tell(controller, Committed(1, 0.01, ("stray_write", "x")), 5.0) == [Send(msg.Drop())]
    assert controller.status.phase is Phase.FOLLOWING and controller.status.served == 0
    assert tell(controller, Tick(), 5.0 + FIRST_RETRY_S) == [plan(0, version=1)]


@pytest.mark.parametrize(("stop", "actions"), [(False, []), (True, [Stop])])
def test_a_commit_that_cannot_be_rolled_back_poisons_the_engine(stop: bool, actions: list[type]) -> None:
    controller = make(stop_on_error=stop)
    joined(controller, latest=1)
    stage(controller, hop(1))
    done = tell(controller, Committed(1, 0.01, ("internal", "x"), trusted=False), 5.0)
    assert [type(action) for action in done] == actions
    assert controller.status.phase is Phase.POISONED and controller.status.failures["poisoned"] == 1
    assert tell(controller, tip(2), 6.0) == [] and tell(controller, Tick(), 1e9) == []
    assert controller.status.latest == 2  # the lag still shows


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (EngineFailed(0, "unsupported_layout", "no"), "unsupported_layout"),
        (msg.Lost("gone"), "rank_lost"),
        (Traced(0, SPECS, (LAYOUTS[0],)), "unsupported_layout"),  # half of proj is nowhere
        (Traced(0, SPECS, (RankLayout((whole("norm", 4),), ()),) * 2), "unmapped"),
        (Traced(0, SPECS, (RankLayout(LAYOUTS[0].regions, (("proj", "permuted"),)), LAYOUTS[1])), "unsupported_layout"),
    ],
)
def test_what_cannot_be_cured_halts_at_once_and_names_itself(event: msg.Message, cause: str) -> None:
    controller = make()
    tell(controller, tip(0), 0.0)
    assert tell(controller, event, 0.0) == []
    assert controller.status.phase is Phase.HALTED and list(controller.status.failures) == [cause]


def test_unmapped_tensors_are_served_without_when_the_policy_says_so() -> None:
    controller = make(ignore_unmapped=True)
    tell(controller, tip(1), 0.0)
    only_norm = (RankLayout((whole("norm", 4),), ()),) * 2
    assert tell(controller, Traced(0, SPECS, only_norm), 0.0) == [Send(msg.Prove())]
    assert controller.status.unmapped == ("proj",)
    for rank in (0, 1):
        actions = tell(controller, msg.Proved(ONE, 0.1), 0.0, rank)
    assert (
        isinstance(actions[0], Send) and isinstance(actions[0].message, msg.Locate) and actions[0].message.skip == (1,)
    )
    tell(controller, found(0), 0.0)
    for rank in (0, 1):
        tell(controller, msg.Holding(place(0)), 0.0, rank)
    tell(controller, msg.Planned(hop(1)), 0.0)
    lanes, both = np.array([[3] * 4], dtype=np.uint32), np.array([[3] * 4, [9] * 4], dtype=np.uint32)
    for rank in (0, 1):
        actions = tell(controller, msg.Staged(1, (0,), lanes, (0, 1), both, 1, 0, None, 1, None, 0.1, 0.1), 0.0, rank)
    assert actions == [Commit(RUN, 1)]


def test_an_unreachable_bucket_is_counted_and_nothing_else_happens() -> None:
    controller = make()
    joined(controller)
    assert tell(controller, msg.PollFailed("unavailable", "no route"), 1.0) == []
    assert controller.status.failures == {"unavailable": 1} and controller.status.phase is Phase.FOLLOWING


def test_an_empty_bucket_settles_a_start() -> None:
    controller = make()
    assert not controller.status.settled
    tell(controller, msg.NothingPublished(), 0.0)
    assert controller.status.settled
    tell(controller, tip(0), 0.0)
    assert not controller.status.settled


def test_late_answers_of_a_join_that_was_given_up_do_not_start_a_second_one() -> None:
    controller = make()
    tell(controller, tip(0), 0.0)
    tell(controller, msg.Failed("load_base", None, "unavailable", "x"), 0.0, 0)
    tell(controller, Tick(), FIRST_RETRY_S)
    assert tell(controller, msg.BaseLoaded(False), 2.0, 0) == []
    assert tell(controller, msg.BaseLoaded(False), 2.0, 1, late=2) == []  # an answer to the first LoadBase
    assert tell(controller, Traced(0, SPECS, LAYOUTS), 2.0, late=2) == []
    assert tell(controller, msg.BaseLoaded(False), 2.0, 1) == [Trace(0)]


def test_a_join_that_fails_at_its_last_step_is_begun_again() -> None:
    controller = make()
    tell(controller, tip(0), 0.0)
    for rank in (0, 1):
        tell(controller, msg.BaseLoaded(False), 0.0, rank)
    tell(controller, Traced(0, SPECS, LAYOUTS), 0.0)
    for rank in (0, 1):
        tell(controller, proved(5, rank + 1), 0.0, rank)
    tell(controller, found(0), 0.0)
    tell(controller, msg.Holding(place(0)), 0.0, 0)
    assert tell(controller, msg.Failed("joined", None, "unavailable", "x"), 0.0, 1) == [Send(msg.Drop())]
    assert controller.status.served is None
    assert tell(controller, Tick(), FIRST_RETRY_S) == [Send(msg.LoadBase(RUN, ref(0)))]


def test_a_commit_under_way_when_the_engine_halts_is_still_accounted_for() -> None:
    for committed, phase, served in (
        (Committed(1, 0.01), Phase.HALTED, 1),
        (Committed(1, 0.01, ("stray_write", "x")), Phase.HALTED, 0),
        (Committed(1, 0.01, ("poisoned", "x"), trusted=False), Phase.POISONED, 0),
    ):
        controller = make()
        joined(controller, latest=1)
        stage(controller, hop(1))
        tell(controller, msg.Lost("gone"), 0.0, 1)
        tell(controller, committed, 1.0)
        assert (controller.status.phase, controller.status.served) == (phase, served)
        assert len(controller.status.commits) == served


def test_a_start_is_settled_by_what_was_latest_then_however_fast_the_log_grows() -> None:
    controller = make()
    joined(controller, latest=1)
    assert not controller.status.settled
    tell(controller, tip(2), 0.0)
    take(controller, hop(1))
    assert controller.status.settled and controller.status.served == 1


def test_giving_up_obeys_the_policy() -> None:
    assert make().give_up("internal", "x") == []
    assert make(stop_on_error=True).give_up("internal", "x") == [Stop("x")]
