"""Version 0 names a checkpoint exactly when it is that checkpoint; otherwise the base itself is uploaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import Training, TroubledStore, logged, state_of

from vllm_delta_sync.errors import BaseMismatch, ConfigError
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.trainer import Publisher

SHA = "0123456789abcdef0123456789abcdef01234567"


class Config:
    """What a transformers config has to do with a base: where the model was loaded from, and its JSON."""

    def __init__(self, name: str) -> None:
        self._name_or_path = name

    def to_json_string(self) -> str:
        return json.dumps({"model_type": "tiny", "dtype": "float32"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with bf16 and fp32 tensors and small files beside them."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tensors = {"a": torch.randn(30, 7).bfloat16(), "b": torch.randn(5).bfloat16(), "bias": torch.randn(4)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def first(store: TroubledStore):  # type: ignore[no-untyped-def]
    return DeltaLog.open(store).manifests()[0]


def test_a_checkpoint_directory_is_named_and_not_uploaded(store: TroubledStore, checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    with Publisher.open(store, checkpoint) as publisher:
        weights["a"][3] += 1
        weights["bias"] *= 1.001  # the checkpoint's dtype is kept: fp32 stays fp32
        assert publisher.publish(weights).changed == 7 + 4
    assert first(store).base.model == str(checkpoint.resolve())
    assert first(store).anchor is None
    assert not [key for key in store.puts if "anchors" in key]
    assert logged(store)["bias"] == weights["bias"].numpy().tobytes()


def test_a_model_in_memory_is_uploaded_as_a_checkpoint_that_can_be_loaded(
    store: TroubledStore, training: Training, tmp_path: Path
) -> None:
    training.model.config = Config("")
    Publisher.open(store, training.model).close()
    manifest = first(store)
    assert manifest.base is None
    files = {Path(file.key).name: store.get(f"{DeltaLog.open(store).run}/{file.key}") for file in manifest.anchor.files}
    config = json.loads(files["config.json"])
    assert (config["architectures"], config["model_type"]) == (["Tiny"], "tiny")
    (tmp_path / "anchor.safetensors").write_bytes(files["model.safetensors"])
    assert state_of(load_file(tmp_path / "anchor.safetensors")) == training.state()


@pytest.mark.parametrize(("touched", "named"), [(False, True), (True, False)])
def test_a_model_loaded_from_a_checkpoint_is_named_only_while_it_is_unchanged(
    store: TroubledStore, checkpoint: Path, touched: bool, named: bool
) -> None:
    model = torch.nn.Module()
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    model.config = Config(str(checkpoint))
    if touched:
        model.b.data[0] += 1
    Publisher.open(store, model, dtype=None).close()
    assert (first(store).base is not None, first(store).anchor is None) == (named, named)
    if not named:
        assert {Path(file.key).name for file in first(store).anchor.files} >= {"tokenizer.json", "config.json"}


def test_a_hub_id_is_found_in_the_local_cache_with_its_revision(
    store: TroubledStore, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "cache" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(SHA)
    (repository / "snapshots").mkdir()
    checkpoint.rename(repository / "snapshots" / SHA)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    Publisher.open(store, "someone/tiny").close()
    assert (first(store).base.model, first(store).base.revision) == ("someone/tiny", SHA)
    weights = load_file(repository / "snapshots" / SHA / "model.safetensors")
    Publisher.open(store, weights, model_id="someone/tiny", dtype=None).close()
    assert first(store).base.model == "someone/tiny" and first(store).anchor is None
    Publisher.open(store, weights, model_id="someone/tiny").close()  # its fp32 bias is published as bf16: another state
    assert first(store).base is None and first(store).anchor is not None
    with (
        Publisher.open(store, "someone/tiny", anchor="always") as publisher,
        Publisher.open(store, resume=True) as again,
    ):
        assert again.run == publisher.run
    with pytest.raises(ConfigError, match="neither a directory nor in the local Hugging Face cache"):
        Publisher.open(store, "someone/else")


def test_a_base_that_receivers_must_bring_is_not_uploaded(store: TroubledStore, training: Training) -> None:
    with Publisher.open(store, training.model, anchor="never") as publisher:
        base = training.state()
        original = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        training.step()
        publisher.publish(training.model)
    assert first(store).base is None and first(store).anchor is None
    with pytest.raises(BaseMismatch, match="nothing at hand is the base of this run"):
        Publisher.open(store, training.model, resume=True)  # it has moved on
    with pytest.raises(BaseMismatch, match="none was given"):
        Publisher.open(store, resume=True)
    del original["head.weight"]
    assert state_of(original) == base
    with Publisher.open(store, original, resume=True) as publisher:
        assert publisher.publish(training.model).changed == 0


def test_a_base_that_was_damaged_since_does_not_keep_the_next_one_from_being_tried(
    store: TroubledStore, checkpoint: Path
) -> None:
    original = {n: t.clone() for n, t in load_file(checkpoint / "model.safetensors").items()}
    weights = {name: tensor.clone() for name, tensor in original.items()}
    Publisher.open(store, checkpoint, anchor="always").close()
    run = DeltaLog.open(store).run
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").write_bytes(b"damaged")
    with Publisher.open(store, checkpoint, resume=True) as publisher:  # from the anchor
        assert publisher.run == run
        weights["b"] += 1
        assert publisher.publish(weights).changed == 5
    key = next(key for key in store.list() if key.endswith("/model.safetensors"))
    store.delete([key])
    (checkpoint / "model.safetensors").unlink()
    for given in (None, checkpoint, checkpoint / "gone"):
        with pytest.raises(BaseMismatch, match="nothing at hand") as caught:
            Publisher.open(store, given, resume=True)
        assert ("'" + str(checkpoint / "gone") + "' is neither" in str(caught.value)) == (given == checkpoint / "gone")
        assert "none was given" not in str(caught.value)
    with Publisher.open(store, original, dtype=None, resume=True) as publisher:
        assert publisher.publish(weights).changed == 0


def test_a_base_given_as_pairs_is_tied_after_a_resume_as_before(store: TroubledStore, training: Training) -> None:
    def pairs():  # type: ignore[no-untyped-def]
        return ((name, tensor) for name, tensor in training.model.state_dict().items())

    original = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    original["head.weight"] = original["embed.weight"]
    with Publisher.open(store, pairs()) as publisher:
        training.step()
        publisher.publish(pairs())
    training.step()
    with Publisher.open(store, iter(original.items()), resume=True) as publisher:
        assert publisher.publish(pairs()).changed > 0
    assert logged(store) == training.state()


def test_resuming_with_a_changed_model_publishes_exactly_the_difference(
    store: TroubledStore, training: Training
) -> None:
    with Publisher.open(store, training.model) as publisher:
        run = publisher.run
        for _ in range(2):
            training.step()
            publisher.publish(training.model)
    with torch.no_grad():
        training.model.up.weight[3, :5] *= -1
    with Publisher.open(store, training.model, resume=True) as publisher:
        assert (publisher.run, publisher.version) == (run, 2)
        publication = publisher.publish(training.model, step=3)
        assert (publication.version, publication.changed) == (3, 5)
    assert logged(store) == training.state()
    assert [manifest.version for manifest in DeltaLog.open(store).manifests()] == [0, 1, 2, 3]


def test_resuming_where_nothing_was_published_begins_a_run(store: TroubledStore, training: Training) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        Publisher.open(store, resume=True)
    with Publisher.open(store, training.model, resume=True) as publisher:
        assert publisher.version == 0
    assert logged(store) == training.state()


def test_a_base_of_bf16_with_an_fp64_and_an_empty_tensor_is_published_in_bf16(store: TroubledStore) -> None:
    weights = {"w": torch.randn(3, dtype=torch.float64), "none": torch.empty(0, 4), "one": torch.tensor(2.0)}
    with Publisher.open(store, weights) as publisher:
        weights["one"] = weights["one"] + 1
        assert publisher.publish(weights).changed == 1
    assert {spec.dtype for spec in DeltaLog.open(store).base_table().tensors} == {"BF16"}
    assert logged(store) == state_of(weights)
