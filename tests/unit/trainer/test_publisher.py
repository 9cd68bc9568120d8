"""Every version in the log is the model at its publish, bit for bit, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from tiny_training import Training, TroubledStore, logged, state_of

from vllm_delta_sync.errors import BaseMismatch, ConfigError, PublishError, RivalWriter, UnsettledWrite
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.trainer import Publisher
from vllm_delta_sync.trainer.pipeline import InFlight


def test_every_version_of_an_optimiser_run_is_the_model_at_that_step(store: TroubledStore, training: Training) -> None:
    states = [training.state()]
    with Publisher.open(store, training.model) as publisher:
        for step in range(1, 6):
            training.step()
            publication = publisher.publish(training.model, step=step, metadata={"reward": "1"})
            states.append(training.state())
            assert (publication.version, publication.step) == (step, step)
            different = sum(a != b for old, new in zip(*states[-2:], strict=True) for a, b in pairs(states, old, new))
            assert publication.changed == different > 0
        published = publication.result(timeout=10)
    assert [logged(store, version) for version in range(6)] == states
    tip = DeltaLog.open(store).tip()
    assert (tip.version, tip.step, tip.metadata, tip.totals.bytes) == (5, 5, {"reward": "1"}, published.bytes)
    assert publication.durable and published.sha256 == DeltaLog.open(store).latest().manifest.sha256


def pairs(states: list[dict[str, bytes]], old: str, new: str) -> list[tuple[bytes, bytes]]:
    """The elements of one tensor in the last two states."""
    a, b = states[-2][old], states[-1][new]
    width = 8 if old.endswith("num_batches_tracked") else 2
    return [(a[i : i + width], b[i : i + width]) for i in range(0, len(a), width)]


def test_the_weights_may_change_as_soon_as_publish_returns(store: TroubledStore) -> None:
    weights = {"w": torch.zeros(1000), "dense": torch.zeros(1000)}
    with Publisher.open(store, weights) as publisher:
        store.gate.clear()
        weights["w"][::100] = 1
        weights["dense"].normal_()
        publisher.publish(weights)
        wanted = state_of(weights)
        weights["w"].fill_(7)
        weights["dense"].fill_(7)
        publisher.publish(weights)
        store.gate.set()
    assert logged(store, 1) == wanted
    assert logged(store, 2) == state_of(weights)


def test_a_version_in_which_nothing_changed_keeps_steps_in_step(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model) as publisher:
        publication = publisher.publish(training.model, step=7)
        assert publication.changed == 0
        assert publication.result(10).version == 1
    tip = DeltaLog.open(store).tip()
    assert (tip.version, tip.step, tip.totals.changed, len(tip.shards)) == (1, 7, 0, 1)


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


def test_whoever_waited_for_a_version_sees_that_it_is_durable(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model) as publisher:
        for _ in range(10):
            publication = publisher.publish(training.model)
            publisher.wait()
            assert publication.durable


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


def test_publish_blocks_while_as_many_versions_are_on_their_way_as_allowed(
    store: TroubledStore, training: Training
) -> None:
    publisher = Publisher.open(store, training.model, max_in_flight=2)
    store.gate.clear()
    publisher.publish(training.model)
    publisher.publish(training.model)
    third: list[float] = []
    thread = threading.Thread(target=lambda: third.append(publisher.publish(training.model).waited_s))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not third
    store.gate.set()
    thread.join(10)
    assert third[0] > 0.15
    publisher.close()
    assert DeltaLog.open(store).tip().version == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("scale"), r"1 of the base's \d+ tensors are missing .*\(scale\)"),
        (lambda state: state.update(extra=torch.ones(2)), "the base has no tensor extra"),
        (lambda state: state.update(scale=torch.ones(2)), r"scale: has shape \[2\], the base \[\]"),
        (lambda state: state.update({"head.weight": torch.ones(50, 16)}), r"embed\.weight: comes twice"),
        (lambda state: [state.update({f"module.{n}": state.pop(n)}) for n in list(state)], "inside the wrapper"),
    ],
)
def test_weights_that_are_not_the_bases_are_refused_before_anything_is_written(
    store: TroubledStore, training: Training, change, words: str
) -> None:  # type: ignore[no-untyped-def]
    with Publisher.open(store, training.model) as publisher:
        written = list(store.puts)
        training.step()
        state = dict(training.model.state_dict())
        change(state)
        with pytest.raises(BaseMismatch, match=words):
            publisher.publish(state)
        assert store.puts == written
        assert publisher.publish(training.model).version == 1
    assert logged(store) == training.state()


def test_a_module_a_state_dict_and_a_stream_publish_the_same(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model) as publisher:
        training.step()
        assert publisher.publish(training.model).changed > 0
        copies = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        assert publisher.publish(training.model.state_dict()).changed == 0
        assert publisher.publish(copies).changed == 0  # the tied pair is two equal tensors here
        assert publisher.publish((name, tensor.clone()) for name, tensor in copies.items()).changed == 0
        assert publisher.publish(training.model.bfloat16()).changed == 0
        del copies["embed.weight"]  # its tied name stands for it
        assert publisher.publish(copies).changed == 0


def test_two_publishers_on_one_run_notice_each_other_and_the_second_to_write_stops(
    store: TroubledStore, training: Training
) -> None:
    first = Publisher.open(store, training.model)
    second = Publisher.open(store, training.model, resume=True)
    assert second.run == first.run
    training.step()
    second.publish(training.model)
    second.wait()
    first.publish(training.model)
    with pytest.raises(RivalWriter, match="another publisher"):
        first.wait()
    with pytest.raises(RivalWriter, match="closed for good"):
        first.publish(training.model)
    first.close()
    training.step()
    second.publish(training.model)
    second.close()
    assert logged(store) == training.state()


def test_metadata_that_does_not_fit_is_refused_at_once(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model) as publisher:
        with pytest.raises(ConfigError, match="larger than"):
            publisher.publish(training.model, metadata={"log": "x" * 20_000})
        with pytest.raises(ConfigError, match="strings to strings"):
            publisher.publish(training.model, metadata={"reward": 1.0})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="UTF-8 cannot write"):
            publisher.publish(training.model, metadata={"reward": "\ud800"})
        assert publisher.version == 0


@pytest.mark.parametrize("step", [3.0, "3", 2**62 + 1, -(2**62) - 1])
def test_a_step_that_is_none_is_refused_at_once(store: TroubledStore, training: Training, step: int) -> None:
    with Publisher.open(store, training.model) as publisher:
        with pytest.raises(ConfigError, match="step is"):
            publisher.publish(training.model, step=step)
        assert publisher.version == 0


def test_a_step_may_be_an_integer_of_numpy(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model) as publisher:
        assert publisher.publish(training.model, step=np.int64(3)).step == 3  # type: ignore[arg-type]
    assert DeltaLog.open(store).tip().step == 3


def test_a_run_begun_where_one_was_to_be_resumed_is_warned_of(
    store: TroubledStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm_delta_sync"), Publisher.open(store, training.model, resume=True) as new:
        assert [(store.uri in text, new.run in text) for text in caplog.messages] == [(True, True)]
        caplog.clear()
    with Publisher.open(store, training.model, resume=True):
        assert caplog.messages == []


@pytest.mark.parametrize("settings", [{"max_in_flight": 0}, {"threads": 0}, {"anchor": "sometimes"}])
def test_a_setting_out_of_range_is_refused(store: TroubledStore, training: Training, settings: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Publisher.open(store, training.model, **settings)
    assert store.puts == []
