"""What fails on the way to a durable version is unwound, told once, and published again by the next."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
from tiny_training import Training, TroubledStore, logged

from vllm_delta_sync.errors import PublishError, UnsettledWrite
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.trainer import Publisher
from vllm_delta_sync.trainer.pipeline import InFlight
from vllm_delta_sync.trainer.snapshot import Delta


@pytest.mark.parametrize("part", ["safetensors", "manifest.json", "LATEST"])
@pytest.mark.parametrize("after", [False, True], ids=["before it arrives", "after it arrived"])
def test_an_upload_that_fails_anywhere_loses_nothing(
    store: TroubledStore, training: Training, part: str, after: bool
) -> None:
    states = [training.state()]
    with Publisher.open(store, training.model) as publisher:
        training.step()
        publisher.publish(training.model)
        publisher.wait()
        states.append(training.state())
        once = [part]
        store.fail, store.after = (lambda key: key.endswith(part) and bool(once) and bool(once.pop())), after
        training.step()
        lost = publisher.publish(training.model)
        if part == "LATEST" and after:  # only the answer was lost: the version is there, and the writer can tell
            assert lost.result(10).version == 2
            states.append(training.state())
        else:
            with pytest.raises(PublishError, match="version 2 did not become durable"):
                lost.result(10)
            with pytest.raises(PublishError, match=r"version 2 did not become durable .* nothing is lost"):
                publisher.wait()
            assert publisher.version == 1
        store.fail = lambda key: False
        training.step()
        publisher.publish(training.model)
        states.append(training.state())
    assert [logged(store, version) for version in range(len(states))] == states
    assert DeltaLog.open(store).tip().version == len(states) - 1


def test_a_version_of_which_nobody_can_tell_whether_it_arrived_closes_the_publisher(
    store: TroubledStore, training: Training
) -> None:
    publisher = Publisher.open(store, training.model)
    store.fail, store.after = (lambda key: key.endswith("LATEST")), True
    training.step()
    publisher.publish(training.model)
    with pytest.raises(UnsettledWrite, match="resume=True"):
        publisher.wait()
    with pytest.raises(UnsettledWrite):
        publisher.publish(training.model)
    publisher.close()
    store.fail = lambda key: False
    with Publisher.open(store, resume=True) as again:
        training.step()
        assert again.publish(training.model).version == 2
    assert logged(store) == training.state()


@pytest.mark.parametrize("queued", [False, True], ids=["before it is queued", "after it was queued"])
def test_an_interrupt_once_the_changes_are_found_loses_none_of_them(
    store: TroubledStore, training: Training, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    with Publisher.open(store, training.model) as publisher:
        submit = publisher._pipeline.submit

        def interrupted(version: InFlight) -> None:
            if queued:
                submit(version)
            raise KeyboardInterrupt

        training.step()
        with monkeypatch.context() as patch:
            patch.setattr(publisher._pipeline, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(training.model)
        after = publisher.publish(training.model)
        assert (after.version, after.changed > 0) == ((2, False) if queued else (1, True))
    assert logged(store) == training.state()


def test_an_interrupt_while_versions_are_taken_back_loses_none_of_them(
    store: TroubledStore, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher.open(store, training.model) as publisher:
        undo = publisher._snapshot.undo

        def interrupted(delta: Delta) -> None:
            undo(delta)
            raise KeyboardInterrupt

        store.gate.clear()
        store.fail = lambda key: True
        for _ in range(2):
            training.step()
            publisher.publish(training.model)
        with monkeypatch.context() as patch:
            patch.setattr(publisher._snapshot, "undo", interrupted)
            store.gate.set()
            with pytest.raises(KeyboardInterrupt):
                publisher.wait()
        store.fail = lambda key: False
        with pytest.raises(PublishError, match="versions 1 to 2 did not become durable"):
            publisher.wait()
        assert publisher.publish(training.model).version == 1
    assert logged(store) == training.state()


def test_a_caller_that_stops_waiting_for_an_outcome_does_not_cancel_it(
    store: TroubledStore, training: Training
) -> None:
    async def impatient(outcome: Future[object]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(outcome), 0.01)

    with Publisher.open(store, training.model) as publisher:
        store.gate.clear()
        training.step()
        publication = publisher.publish(training.model)
        asyncio.run(impatient(publication.outcome))
        assert not publication.outcome.cancel()
        store.gate.set()
        assert publication.result(10).version == 1
    assert logged(store) == training.state()


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_of_an_outcome_cannot_wait_for_its_own_thread(
    store: TroubledStore, training: Training, fails: bool
) -> None:
    raised: list[BaseException] = []

    def call_back(outcome: object) -> None:
        for call in (publisher.wait, publisher.close, lambda: publisher.publish(training.model)):
            try:
                call()
            except PublishError as error:
                raised.append(error)

    publisher = Publisher.open(store, training.model, max_in_flight=1)
    store.gate.clear()
    publisher.publish(training.model).outcome.add_done_callback(call_back)
    store.fail = lambda key: fails
    threading.Timer(0.05, store.gate.set).start()  # while the next one waits for room
    if fails:
        with pytest.raises(PublishError, match="did not become durable"):
            publisher.publish(training.model)
    else:
        assert publisher.publish(training.model).version == 2
    store.fail = lambda key: False
    publisher.close()
    assert [str(error)[:10] for error in raised] == ["a callback"] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_that_exits_ends_the_publisher_no_more_than_one_that_fails(
    store: TroubledStore, training: Training, fails: bool
) -> None:
    ended = threading.Event()

    def call_back(outcome: object) -> None:
        raise SystemExit(1)

    def wait() -> None:
        with pytest.raises(PublishError) if fails else nullcontext():
            publisher.wait()
        ended.set()

    publisher = Publisher.open(store, training.model)
    store.gate.clear()
    store.fail = lambda key: fails
    publisher.publish(training.model).outcome.add_done_callback(call_back)
    store.gate.set()
    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(10)
    store.fail = lambda key: False
    training.step()
    publisher.publish(training.model)
    publisher.close()
    assert logged(store) == training.state()


def test_versions_behind_a_failed_one_are_taken_back_with_it(store: TroubledStore, training: Training) -> None:
    publisher = Publisher.open(store, training.model, max_in_flight=3)
    store.gate.clear()
    store.fail = lambda key: True
    behind = []
    for _ in range(3):
        training.step()
        behind.append(publisher.publish(training.model))
    store.gate.set()
    for publication in behind:
        with pytest.raises(PublishError, match=f"version {publication.version} did not become durable"):
            publication.result(10)
    store.fail = lambda key: False
    with pytest.raises(PublishError, match="versions 1 to 3 did not become durable"):
        publisher.publish(training.model)
    assert publisher.publish(training.model).version == 1
    publisher.close()
    assert logged(store, 1) == training.state()


def test_a_failure_that_somebody_keeps_does_not_keep_the_versions_after_it(
    store: TroubledStore, training: Training
) -> None:
    with Publisher.open(store, training.model) as publisher:
        store.fail = lambda key: True
        training.step()
        kept = publisher.publish(training.model)
        with pytest.raises(PublishError):
            publisher.wait()
        store.fail = lambda key: False
        training.step()
        publisher.publish(training.model).result(10)
        publisher.wait()
        assert kept.outcome.exception() is not None
        assert len(publisher._snapshot._frozen) == 0


def test_close_reports_a_failure_once_and_a_resumed_publisher_publishes_what_was_lost(
    store: TroubledStore, training: Training
) -> None:
    publisher = Publisher.open(store, training.model)
    training.step()
    store.fail = lambda key: True
    publisher.publish(training.model)
    with pytest.raises(PublishError, match="version 1 did not become durable"):
        publisher.close()
    publisher.close()
    with pytest.raises(PublishError, match="closed"):
        publisher.publish(training.model)
    store.fail = lambda key: False
    with Publisher.open(store, resume=True) as again:
        assert again.publish(training.model).changed > 0
    assert logged(store, 1) == training.state()


def test_an_error_in_the_training_loop_is_not_hidden_by_one_of_the_store(
    store: TroubledStore, training: Training
) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Publisher.open(store, training.model) as publisher:
        store.fail = lambda key: True
        publisher.publish(training.model)
        raise ZeroDivisionError
    assert "did not become durable" in caught.value.__notes__[0]
