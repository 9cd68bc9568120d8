"""The engine's decisions as tables: what each event leads to, and what is never done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import (
    Action,
    Adopt,
    Commit,
    Committed,
    EngineFailed,
    Event,
    Send,
    Stop,
    Tick,
    Trace,
    Traced,
)
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.controller import FIRST_RETRY_S, Controller
from vllm_delta_sync.serving.state import Phase
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire.tensors import TensorSpec

RUN = "ab" * 16
SPECS = (TensorSpec("norm", "BF16", (4,)), TensorSpec("proj", "BF16", (8, 4)))
ONE = np.array([[1, 2, 3, 4]], dtype=np.uint32)


def ref(version: int) -> msg.Ref:
    return msg.Ref(version, f"versions/{version}", f"{version:064x}")


def tip(version: int, first: int = 0) -> msg.Tip:
    return msg.Tip(RUN, version, tuple(ref(v) for v in range(first, version + 1)))


def whole(tensor: str, numel: int, storage: int = 0) -> Region:
    return Region(tensor, (numel,), 0, (1,), storage, 0, (1,), "BF16")


def half(tensor: str, start: int) -> Region:
    return Region(tensor, (16,), start, (1,), 0, 0, (1,), "BF16")


# Rank 0 and 1 both hold `norm` (a copy), and half of `proj` each.
LAYOUTS = tuple(RankLayout((whole("norm", 4), half("proj", 16 * rank)), ()) for rank in (0, 1))


def make(**changes: object) -> Controller:
    settings: dict[str, object] = {"ignore_unmapped": False, "stop_on_error": False, "audit_every": 0, **changes}
    return Controller(2, **settings)  # type: ignore[arg-type]


def tell(controller: Controller, event: Event, now: float, rank: int = 0, late: int = 0) -> list[Action]:
    """Handle an event as an answer to the latest command (or to one `late` commands ago); attempts read as 0."""
    if hasattr(event, "attempt"):
        event = replace(event, attempt=controller._attempt - late)
    actions: list[Action] = []
    for action in controller.handle(event, now, rank):
        if isinstance(action, Send):
            action = replace(action, message=replace(action.message, attempt=0))
        actions.append(Trace(0) if isinstance(action, Trace) else action)
    return actions


def proved(norm: int, proj: int) -> msg.Proved:
    return msg.Proved(np.array([[norm] * 4, [proj] * 4], dtype=np.uint32), 0.1)


def staged(version: int, norm: int, proj: int, expected: tuple[int, int]) -> msg.Staged:
    lanes = np.array([[norm] * 4, [proj] * 4], dtype=np.uint32)
    effects = np.array([[e] * 4 for e in expected], dtype=np.uint32)
    return msg.Staged(version, (0, 1), lanes, (0, 1), effects, 100, 7, version * 10, 0.1, 0.2)


def joined(controller: Controller, at: int = 0, latest: int = 0) -> list[object]:
    tell(controller, tip(latest), 0.0)
    for rank in (0, 1):
        tell(controller, msg.BaseLoaded(), 0.0, rank)
    tell(controller, Traced(0, SPECS, LAYOUTS), 0.0)
    for rank in (0, 1):
        tell(controller, proved(5, rank + 1), 0.0, rank)
    tell(controller, msg.Located(at, ""), 0.0)
    tell(controller, msg.Holding(at), 0.0, 0)
    return list(tell(controller, msg.Holding(at), 0.0, 1))


def commit_one(controller: Controller, version: int) -> list[object]:
    for rank in (0, 1):
        tell(controller, staged(version, 3, rank + 1, (3, 3)), 0.0, rank)
    return list(tell(controller, Committed(version, 0.01), 1.0))


def test_joining_goes_from_the_first_tip_to_proven_weights() -> None:
    controller = make()
    assert tell(controller, tip(0), 0.0) == [Send(msg.LoadBase(RUN, ref(0)))]
    assert tell(controller, msg.BaseLoaded(), 0.0, 0) == []
    assert tell(controller, msg.BaseLoaded(), 0.0, 1) == [Trace(0)]
    assert tell(controller, Traced(0, SPECS, LAYOUTS), 0.0) == [Send(msg.Prove())]
    assert tell(controller, proved(5, 1), 0.0, 0) == []
    (locate,) = tell(controller, proved(5, 2), 0.0, 1)
    assert isinstance(locate, Send) and locate.rank == 0 and isinstance(locate.message, msg.Locate)
    # The replicated norm counts once, the halves of proj add up.
    assert locate.message.lanes.tolist() == [[5] * 4, [3] * 4]
    assert tell(controller, msg.Located(0, ""), 0.0) == [Send(msg.Joined(ref(0)))]
    assert tell(controller, msg.Holding(0), 0.0, 0) == [] and controller.status.served is None
    assert tell(controller, msg.Holding(0), 0.0, 1) == [Adopt(RUN, 0)]
    assert controller.status.phase is Phase.FOLLOWING and controller.status.served == 0 and controller.status.settled


def test_a_late_joiner_stages_the_version_after_the_one_it_has() -> None:
    controller = make()
    assert joined(controller, at=1, latest=3) == [Adopt(RUN, 1), Send(msg.Stage(ref(2)))]
    assert not controller.status.settled


def test_a_version_is_committed_only_when_every_rank_staged_it() -> None:
    controller = make()
    joined(controller)
    assert tell(controller, tip(1, 1), 0.0) == [Send(msg.Stage(ref(1)))]
    assert tell(controller, staged(1, 3, 1, (3, 3)), 0.0, 0) == []
    assert tell(controller, staged(1, 3, 2, (3, 3)), 0.0, 1) == [Commit(1)]
    assert tell(controller, Committed(1, 0.01), 1.0) == []
    (record,) = controller.status.commits
    assert (record.version, record.step, record.fetched_bytes, record.changed) == (1, 10, 200, 7)


def test_the_next_version_is_staged_right_after_a_commit() -> None:
    controller = make()
    joined(controller, latest=2)
    assert commit_one(controller, 1) == [Send(msg.Stage(ref(2)))]


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
    tell(controller, staged(1, norms[0], projs[0], expected), 0.0, 0)
    actions = tell(controller, staged(1, norms[1], projs[1], expected), 0.0, 1)
    assert actions == [Send(msg.Drop())]
    assert controller.status.served == 0 and controller.status.failures == {"state_hash": 1}
    assert what in (controller.status.last_error or "")


def test_a_failed_stage_is_tried_again_later_and_later() -> None:
    controller = make()
    joined(controller, latest=1)
    failure = msg.Failed("stage", 1, "digest", "shard is damaged")
    assert tell(controller, failure, 10.0, 1) == [Send(msg.Drop())]
    assert tell(controller, Tick(), 10.0 + FIRST_RETRY_S / 2) == []
    assert tell(controller, Tick(), 10.0 + FIRST_RETRY_S) == [Send(msg.Stage(ref(1)))]
    tell(controller, failure, 20.0, 1)
    assert tell(controller, Tick(), 20.0 + FIRST_RETRY_S * 1.5) == []
    assert tell(controller, Tick(), 20.0 + FIRST_RETRY_S * 2) == [Send(msg.Stage(ref(1)))]
    assert controller.status.failures == {"digest": 2} and controller.status.served == 0


def test_a_late_answer_to_a_dropped_stage_changes_nothing() -> None:
    controller = make()
    joined(controller, latest=1)
    tell(controller, msg.Failed("stage", 1, "digest", "x"), 10.0, 1)
    assert tell(controller, staged(1, 3, 1, (3, 3)), 10.1, 0, late=1) == []
    assert controller.status.phase is Phase.FOLLOWING
    tell(controller, Tick(), 10.0 + FIRST_RETRY_S)
    assert tell(controller, staged(1, 3, 1, (3, 3)), 12.0, 0) == []
    assert tell(controller, staged(1, 3, 2, (3, 3)), 12.0, 1, late=2) == []  # of the first try: not counted
    assert tell(controller, msg.Failed("stage", 1, "digest", "x"), 12.0, 1, late=2) == []
    assert tell(controller, staged(1, 3, 2, (3, 3)), 12.0, 1) == [Commit(1)]


def test_a_commit_that_was_rolled_back_is_tried_again() -> None:
    controller = make()
    joined(controller, latest=1)
    for rank in (0, 1):
        tell(controller, staged(1, 3, rank + 1, (3, 3)), 0.0, rank)
    assert tell(controller, Committed(1, 0.01, ("stray_write", "x")), 5.0) == [Send(msg.Drop())]
    assert controller.status.phase is Phase.FOLLOWING and controller.status.served == 0
    assert tell(controller, Tick(), 5.0 + FIRST_RETRY_S) == [Send(msg.Stage(ref(1)))]


@pytest.mark.parametrize(("stop", "actions"), [(False, []), (True, [Stop])])
def test_a_commit_that_cannot_be_rolled_back_poisons_the_engine(stop: bool, actions: list[type]) -> None:
    controller = make(stop_on_error=stop)
    joined(controller, latest=1)
    for rank in (0, 1):
        tell(controller, staged(1, 3, rank + 1, (3, 3)), 0.0, rank)
    done = tell(controller, Committed(1, 0.01, ("internal", "x"), trusted=False), 5.0)
    assert [type(action) for action in done] == actions
    assert controller.status.phase is Phase.POISONED and controller.status.failures["poisoned"] == 1
    assert tell(controller, tip(2, 2), 6.0) == [] and tell(controller, Tick(), 1e9) == []
    assert controller.status.latest == 2  # the lag still shows


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (msg.Located(None, "differs in 'proj'"), "base_mismatch"),
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
    tell(controller, msg.Located(0, ""), 0.0)
    for rank in (0, 1):
        tell(controller, msg.Holding(0), 0.0, rank)
    lanes, both = np.array([[3] * 4], dtype=np.uint32), np.array([[3] * 4, [9] * 4], dtype=np.uint32)
    for rank in (0, 1):
        actions = tell(controller, msg.Staged(1, (0,), lanes, (0, 1), both, 1, 1, None, 0.1, 0.1), 0.0, rank)
    assert actions == [Commit(1)]


def test_an_audit_runs_every_so_many_versions_and_halts_on_a_wrong_tensor() -> None:
    controller = make(audit_every=1)
    joined(controller, latest=1)
    assert Send(msg.Audit(1)) in commit_one(controller, 1)
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
    assert tell(controller, msg.BaseLoaded(), 2.0, 0) == []
    assert tell(controller, msg.BaseLoaded(), 2.0, 1, late=2) == []  # an answer to the first LoadBase
    assert tell(controller, Traced(0, SPECS, LAYOUTS), 2.0, late=2) == []
    assert tell(controller, msg.BaseLoaded(), 2.0, 1) == [Trace(0)]


def test_a_join_that_fails_at_its_last_step_is_begun_again() -> None:
    controller = make()
    tell(controller, tip(0), 0.0)
    for rank in (0, 1):
        tell(controller, msg.BaseLoaded(), 0.0, rank)
    tell(controller, Traced(0, SPECS, LAYOUTS), 0.0)
    for rank in (0, 1):
        tell(controller, proved(5, rank + 1), 0.0, rank)
    tell(controller, msg.Located(0, ""), 0.0)
    tell(controller, msg.Holding(0), 0.0, 0)
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
        for rank in (0, 1):
            tell(controller, staged(1, 3, rank + 1, (3, 3)), 0.0, rank)
        tell(controller, msg.Lost("gone"), 0.0, 1)
        tell(controller, committed, 1.0)
        assert (controller.status.phase, controller.status.served) == (phase, served)
        assert len(controller.status.commits) == served


def test_a_start_is_settled_by_what_was_latest_then_however_fast_the_log_grows() -> None:
    controller = make()
    joined(controller, latest=1)
    assert not controller.status.settled
    tell(controller, tip(2, 2), 0.0)
    commit_one(controller, 1)
    assert controller.status.settled and controller.status.served == 1


def test_an_audit_that_fails_is_noted_and_another_can_be_asked_for() -> None:
    controller = make()
    joined(controller)
    tell(controller, msg.WantAudit(), 1.0)
    assert tell(controller, msg.Failed("audit", None, "internal", "x"), 1.0, 1) == []
    assert controller.status.phase is Phase.FOLLOWING and controller.status.failures == {"internal": 1}
    assert tell(controller, msg.WantAudit(), 2.0) == [Send(msg.Audit(2))]


def test_giving_up_obeys_the_policy() -> None:
    assert make().give_up("internal", "x") == []
    assert make(stop_on_error=True).give_up("internal", "x") == [Stop("x")]
