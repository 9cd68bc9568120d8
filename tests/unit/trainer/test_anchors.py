"""A publisher writes an anchor where folds are dear, of a state that stays while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_training
import torch
from safetensors.torch import save_file
from tiny_training import Training

from vllm_delta_sync.errors import AnchorOutpaced
from vllm_delta_sync.log import AnchorPolicy, DeltaLog
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.anchors import fetch
from vllm_delta_sync.log.schedule import FOLDS
from vllm_delta_sync.store import open_store
from vllm_delta_sync.trainer import Publisher, source
from vllm_delta_sync.trainer import base as bases
from vllm_delta_sync.trainer.frozen import FrozenState
from vllm_delta_sync.trainer.snapshot import Delta, Snapshot
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.checkpoint import open_checkpoint


def test_a_look_that_finds_the_fold_from_the_base_cheap_keeps_that_fold(tmp_path: Path) -> None:
    training = Training()
    policy = AnchorPolicy(share=1.0, every=3)
    with Publisher.open(str(tmp_path), training.model, folds=None, anchors=policy) as publisher:
        for _ in range(7):
            training.step()
            publisher.publish(training.model)
    catalog = DeltaLog.open(str(tmp_path)).catalog()
    assert {(fold.source, fold.to) for fold in catalog.folds} == {(0, 3), (0, 6)}
    assert catalog.anchors == ()


def test_an_anchor_is_written_when_the_fold_from_the_base_is_dear_and_is_loadable(tmp_path: Path) -> None:
    training = Training()
    states = [training.state()]
    policy = AnchorPolicy(share=1e-6, every=3)
    with Publisher.open(str(tmp_path), training.model, folds=FOLDS, anchors=policy, max_in_flight=1) as publisher:
        for _ in range(7):
            training.step()
            publisher.publish(training.model).result(20)
            states.append(training.state())
    log = DeltaLog.open(str(tmp_path))
    anchors = log.catalog().anchors
    assert 1 <= len(anchors) <= 2
    for number, anchor in enumerate(anchors):
        directory = tmp_path / f"anchor-{number}"
        directory.mkdir()
        fetch(log.store, anchor.checkpoint, directory)
        found = {name: bits.tobytes() for name, (_, bits) in open_checkpoint(directory).items()}
        assert found == states[anchor.version]
        assert len(log.states(anchor.table, anchor.state_root).tensors) == len(found)
    assert checks.verify(log).faults == ()


def test_an_anchor_of_a_state_that_came_back_is_that_of_the_newest_version_in_it(tmp_path: Path) -> None:
    training = Training()
    first = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.step()
    second = training.model.state_dict()
    policy = AnchorPolicy(share=1e-9, every=3)
    with Publisher.open(str(tmp_path), first, folds=None, anchors=policy) as publisher:
        for state in (second, first, second):
            publisher.publish(state)
    log = DeltaLog.open(str(tmp_path))
    assert [anchor.version for anchor in log.catalog().anchors] == [3]
    assert checks.verify(log).faults == ()


def test_a_frozen_state_stays_while_the_snapshot_moves_on_and_back() -> None:
    training = Training()
    base = bases.from_weights(training.model, torch.bfloat16, None, None)
    snapshot = Snapshot(base.tensors, 1)
    names = [*snapshot.specs]

    def moved() -> Delta:
        training.step()
        return snapshot.advance(source.pair_up(training.model, names, base.aliases))

    moved()
    expected = {name: bits.tobytes() for name, (_, bits) in snapshot.tensors.items()}
    with snapshot.freeze({}) as frozen:
        root = state_hash.state_root(snapshot.lanes)
        for undo in (False, True, False):
            delta = moved()
            assert {spec.name: frozen.read(spec).tobytes() for spec in frozen.lanes} == expected
            if undo:
                snapshot.undo(delta)
                assert {spec.name: frozen.read(spec).tobytes() for spec in frozen.lanes} == expected
        assert frozen.state_root == root
        assert not frozen.lost


def test_a_frozen_state_whose_version_is_taken_back_says_so() -> None:
    training = Training()
    base = bases.from_weights(training.model, torch.bfloat16, None, None)
    snapshot = Snapshot(base.tensors, 1)
    training.step()
    delta = snapshot.advance(source.pair_up(training.model, [*snapshot.specs], base.aliases))
    with snapshot.freeze({}) as frozen:
        snapshot.undo(delta)
        assert frozen.lost


def test_an_anchor_of_a_resumed_run_loads_as_the_model_that_was_published(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    bucket = str(tmp_path / "bucket")
    Publisher.open(bucket, tmp_path / "base", folds=None, anchors=None).close()
    with torch.no_grad():
        model.model.norm.weight += 0.5
        model.model.embed_tokens.weight[3] = 0
    with Publisher.open(bucket, resume=True, folds=None, anchors=AnchorPolicy(share=1e-9, every=1)) as publisher:
        publisher.publish(model)
    log = DeltaLog.open(bucket)
    (anchor,) = log.catalog().anchors
    (tmp_path / "anchor").mkdir()
    fetch(log.store, anchor.checkpoint, tmp_path / "anchor")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "anchor")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("changed", [False, True], ids=["gone", "another one by now"])
def test_a_run_whose_base_is_gone_is_resumed_from_its_anchor(tmp_path: Path, changed: bool) -> None:
    training = Training()
    state = {name: tensor for name, tensor in training.model.state_dict().items() if name != "head.weight"}
    weights = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    (tmp_path / "base").mkdir()
    save_file(weights, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"model_type": "tiny"}')
    bucket = str(tmp_path / "bucket")
    with Publisher.open(bucket, tmp_path / "base", folds=None, anchors=AnchorPolicy(1e-9, every=1)) as publisher:
        training.step()
        publisher.publish({name: tensor for name, tensor in training.model.state_dict().items() if name in weights})
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    if changed:
        (tmp_path / "base").mkdir()
        other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
        save_file(other, tmp_path / "base" / "model.safetensors")
    with Publisher.open(bucket, resume=True, folds=None, anchors=AnchorPolicy(1e-9, every=1)) as publisher:
        assert publisher.version == 1
        training.step()
        publisher.publish({name: tensor for name, tensor in training.model.state_dict().items() if name in weights})
    log = DeltaLog.open(bucket)
    assert tiny_training.logged(open_store(bucket), base=tmp_path / "elsewhere") == training.state()
    (tmp_path / "anchor").mkdir()
    fetch(log.store, log.catalog().anchors[-1].checkpoint, tmp_path / "anchor")
    assert (tmp_path / "anchor" / "config.json").read_text() == '{"model_type": "tiny"}'


def test_a_frozen_state_that_the_training_outpaces_is_given_up_and_keeps_nothing() -> None:
    training = Training()
    base = bases.from_weights(training.model, torch.bfloat16, None, None)
    snapshot = Snapshot(base.tensors, 1)
    deltas = []
    with snapshot.freeze({}, most_bytes=100_000) as frozen:
        spec = next(spec for spec in frozen.lanes if spec.name == "up.weight")
        before = frozen.read(spec).tobytes()
        while len(deltas) < 200:
            training.step()
            deltas.append(snapshot.advance(source.pair_up(training.model, [*snapshot.specs], base.aliases)))
            kept = sum(step.bytes for step in frozen._later)
            assert kept <= 100_000
            if kept == 0:
                break
            assert frozen.read(spec).tobytes() == before
        assert len(deltas) > 2
        with pytest.raises(AnchorOutpaced, match="100000 bytes of changes"):
            frozen.read(spec)
        for delta in reversed(deltas):
            assert not frozen.lost
            snapshot.undo(delta)
        with pytest.raises(AnchorOutpaced):
            frozen.read(spec)


def test_an_anchor_that_the_training_outpaces_is_left_out_and_publishing_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    policy = AnchorPolicy(share=1e-9, every=3)
    with (
        caplog.at_level(logging.WARNING),
        Publisher.open(str(tmp_path), training.model, folds=None, anchors=policy) as publisher,
    ):
        real, reached, gate = publisher._snapshot.freeze, threading.Event(), threading.Event()

        @contextmanager
        def held_up(files: Mapping[str, bytes]) -> Iterator[FrozenState]:
            with real(files, most_bytes=1) as frozen:
                reached.set()
                assert gate.wait(20)
                yield frozen

        publisher._snapshot.freeze = held_up  # type: ignore[method-assign, assignment]
        for _ in range(3):
            training.step()
            publisher.publish(training.model)
        assert reached.wait(20)
        training.step()
        publisher.publish(training.model).result(20)
        gate.set()
    assert "no anchor at version 3" in caplog.text and "bytes of changes" in caplog.text
    log = DeltaLog.open(str(tmp_path))
    assert log.catalog().anchors == ()
    assert not [key for key in log.store.list("anchors/") if not key.startswith(f"anchors/{0:020d}")]
    assert tiny_training.logged(open_store(str(tmp_path))) == training.state()
