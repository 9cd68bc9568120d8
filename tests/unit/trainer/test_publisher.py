"""Every version in the log is the model at its publish, bit for bit, whatever the store does meanwhile."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch
from tiny_training import Training, TroubledStore, logged, state_of

from vllm_delta_sync.errors import BaseMismatch, ConfigError, RivalWriter
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.trainer import Publisher


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


def test_whoever_waited_for_a_version_sees_that_it_is_durable(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model) as publisher:
        for _ in range(10):
            publication = publisher.publish(training.model)
            publisher.wait()
            assert publication.durable


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
