"""The engine thread's part of a commit: all ranks or none, what outputs are labelled, what new requests may reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_sync.config import DeltaSyncConfig, parse
from vllm_delta_sync.serving import cores
from vllm_delta_sync.serving.actions import Commit, Committed, EngineFailed, Event, Stop, Trace
from vllm_delta_sync.serving.attached import Attached, EngineWork
from vllm_delta_sync.serving.loop import Gate

FINE: dict[str, Any] = {"ok": True}
WRONG: dict[str, Any] = {"ok": False, "cause": "stray_write", "text": "element 7"}


class Core:
    """An engine core of two ranks, as far as a commit touches one.

    Args:
        answers: per RPC method, what the ranks answer, or an exception that the call raises.
    """

    def __init__(self, in_flight: int = 0, unfinished: bool = False, multimodal: bool = False, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.version = "default"
        self.batch_queue = deque(range(in_flight))
        self.scheduler = SimpleNamespace(has_unfinished_requests=lambda: unfinished)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=multimodal))
        self.resets: list[str] = []

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append(method)
        self.arguments = args
        answer = self.answers.get(method, [FINE, FINE])
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.resets.append("prefix")
        raise RuntimeError("waiting for a remote transfer")

    def reset_encoder_cache(self) -> None:
        self.resets.append("encoder")


def config(**settings: Any) -> DeltaSyncConfig:
    return parse({"store": "file:///bucket", **settings}, "test")


def work(core: Core, **settings: Any) -> EngineWork:
    engine = EngineWork(core, config(**settings))
    engine.adopt("run", 0)
    return engine


def committed(event: Event) -> Committed:
    assert isinstance(event, Committed)
    return event


def test_ranks_are_told_which_cores_none_of_them_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "of_this_process", lambda: frozenset(range(8)))
    bound = [{"ok": True, "cores": frozenset({0, 1, 2})}, {"ok": True, "cores": frozenset({3, 4, 5})}]
    core = Core(delta_sync_cores=bound)
    assert work(core).open("address", b"key") == 2
    assert core.calls == ["delta_sync_cores", "delta_sync_open"]
    assert core.arguments == ("address", b"key".hex(), frozenset({6, 7}))


def test_a_commit_on_all_ranks_moves_label_and_salt() -> None:
    core = Core()
    engine = work(core)
    assert core.version == "0" and engine.salt == "run:0"
    assert committed(engine.commit("run", 1)).error is None
    assert core.calls == ["delta_sync_commit"] and core.version == "1" and engine.salt == "run:1"


def test_a_rank_that_cannot_makes_all_go_back_and_its_salt_is_never_used_again() -> None:
    core = Core(delta_sync_commit=[FINE, WRONG])
    engine = work(core)
    event = committed(engine.commit("run", 1))
    assert event.error is not None and event.error[0] == "stray_write" and "rank 1: element 7" in event.error[1]
    assert event.trusted and core.calls == ["delta_sync_commit", "delta_sync_rollback"]
    assert core.version == "0" and engine.salt == "run:0"
    core.answers = {}
    engine.commit("run", 1)
    assert engine.salt not in ("run:0", "run:1")


def test_a_version_that_comes_back_is_given_another_salt_for_blocks_of_its_first_time_may_be_mixed() -> None:
    engine = work(Core())
    salts = [engine.salt]
    for run, version in (("run", 1), ("run", 2), ("run", 1), ("run", 2), ("run", 3)):
        engine.commit(run, version)
        salts.append(engine.salt)
    for run, version in (("other", 0), ("run", 3)):  # joined by content: another run, and the first one again
        engine.adopt(run, version)
        salts.append(engine.salt)
    assert len(set(salts)) == len(salts) and salts[:3] == ["run:0", "run:1", "run:2"]


@pytest.mark.parametrize(
    "answers",
    [
        {"delta_sync_commit": [FINE, WRONG], "delta_sync_rollback": [WRONG, FINE]},
        {"delta_sync_commit": [FINE, {"ok": False, "cause": "poisoned", "text": "half written"}]},
        {"delta_sync_commit": [WRONG, {"ok": False, "cause": "poisoned", "text": "half written"}]},
        {"delta_sync_commit": TimeoutError("no reply")},
        {"delta_sync_commit": [WRONG, FINE], "delta_sync_rollback": RuntimeError("dead")},
    ],
)
def test_weights_that_may_be_half_written_are_not_trusted(answers: dict[str, Any]) -> None:
    event = committed(work(Core(**answers)).commit("run", 1))
    assert event.error is not None and not event.trusted


@pytest.mark.parametrize("later", [False, True])
def test_caches_that_vllm_cannot_drop_end_neither_the_commit_nor_the_server(
    later: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = Core(multimodal=True, unfinished=later)
    monkeypatch.delattr(Core, "reset_encoder_cache")
    engine = work(core)
    event = committed(engine.commit("run", 1))
    assert event.error is None and event.trusted and core.version == "1"
    core.scheduler.has_unfinished_requests = lambda: False
    engine.after_batch()
    assert caplog.text.count("run:1 is served, but") == 1


def test_after_a_lost_reply_no_rank_is_called_again() -> None:
    core = Core(delta_sync_commit=TimeoutError("no reply"))
    work(core).commit("run", 1)
    assert core.calls == ["delta_sync_commit"]


def test_batches_in_flight_at_a_commit_keep_the_old_label() -> None:
    core = Core(in_flight=2)
    engine = EngineWork(core, config())
    engine.commit("run", 1)
    assert core.version == "default"
    engine.after_batch()
    assert core.version == "default"
    engine.commit("run", 2)  # one of the two is still in flight, and a new one with version 1
    engine.after_batch()
    assert core.version == "1"
    engine.after_batch()
    assert core.version == "2"


@pytest.mark.parametrize(("policy", "salted"), [("keep", False), ("reset_prefix", True), ("recompute", True)])
def test_new_requests_are_salted_with_the_version_unless_all_blocks_are_kept(policy: str, salted: bool) -> None:
    attached = Attached.__new__(Attached)
    attached.config = config(kv_cache=policy)
    attached.ops = work(Core())
    request = SimpleNamespace(cache_salt="tenant")
    attached.salt(request)
    assert request.cache_salt == ("tenant|delta-sync:run:0" if salted else "tenant")


def test_a_cache_that_cannot_be_reset_does_not_undo_or_end_anything() -> None:
    core = Core()
    assert committed(work(core, kv_cache="recompute").commit("run", 1)).error is None
    assert core.resets == ["prefix"] and core.version == "1"


def test_encoder_outputs_go_as_soon_as_no_request_needs_them() -> None:
    core = Core(unfinished=True, multimodal=True)
    engine = work(core)
    engine.commit("run", 1)
    engine.after_batch()
    assert core.resets == []
    core.scheduler.has_unfinished_requests = lambda: False
    engine.after_batch()
    engine.after_batch()
    assert core.resets == ["encoder"]


def test_a_trace_that_a_rank_cannot_do_is_told() -> None:
    wrong = {"ok": False, "cause": "unsupported_layout", "text": "permuted"}
    event = work(Core(delta_sync_trace=[wrong, FINE])).trace(3)
    assert event == EngineFailed(3, "unsupported_layout", "rank 0: permuted")


class Ops:
    """Work that only notes that it was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def trace(self, attempt: int) -> Event:
        self.done.append(f"trace {attempt}")
        return EngineFailed(attempt, "x", "x")

    def adopt(self, run: str, version: int) -> None:
        self.done.append(f"adopt {version}")

    def commit(self, run: str, version: int) -> Event:
        self.done.append(f"commit {version} of {run}")
        return Committed(version, 0.0)

    def stop(self, text: str) -> Any:
        raise SystemExit(text)


def test_the_gate_wakes_the_engine_and_runs_what_waits_in_order() -> None:
    woken: list[int] = []
    reported: list[Event] = []
    wake: Callable[[], None] = lambda: woken.append(1)  # noqa: E731
    ops = Ops()
    gate = Gate(ops, wake, reported.append)
    gate.submit(Trace(1))
    gate.submit(Commit("run", 4))
    assert len(woken) == 2 and ops.done == []
    gate.run_pending()
    assert ops.done == ["trace 1", "commit 4 of run"]
    assert reported == [EngineFailed(1, "x", "x"), Committed(4, 0.0)]
    gate.run_pending()
    assert len(ops.done) == 2
    gate.submit(Stop("by policy"))
    with pytest.raises(SystemExit):
        gate.run_pending()
