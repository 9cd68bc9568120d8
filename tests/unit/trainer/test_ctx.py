"""Publishing against the values before: a log of ctx blocks leads to the model of a trainer that is versions ahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_delta_sync.errors import BaseNeeded, ConfigError, MalformedObject, NotFound
from vllm_delta_sync.log import DeltaLog, FoldSchedule, verify
from vllm_delta_sync.log.folding import write_fold, write_scheduled
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.shelf import Shelf
from vllm_delta_sync.trainer import Publisher
from vllm_delta_sync.trainer.splits import split_dim
from vllm_delta_sync.wire.catalog import Fold
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.tensors import TensorSpec

State = dict[str, bytes]


class Model(torch.nn.Module):
    """Two projections and a norm, moved by normal updates of an fp32 master; one of them every other step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj = torch.nn.Linear(96, 256, bias=False)
        self.down_proj = torch.nn.Linear(256, 96, bias=False)
        self.norm = torch.nn.LayerNorm(96)

    def step(self, number: int) -> None:
        with torch.no_grad():
            for parameter in (*self.down_proj.parameters(), *(self.parameters() if number % 2 else ())):
                parameter += torch.randn_like(parameter) * 3e-5

    def state(self) -> State:
        return {
            name: parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes()
            for name, parameter in self.named_parameters()
        }


def published(where: Path, folds: FoldSchedule | None = None) -> tuple[DeltaLog, list[State]]:
    """A log of six versions after its base, and the state at each."""
    model = Model()
    states = [model.state()]
    with Publisher.open(str(where), model, folds=folds, anchors=None, max_in_flight=3) as publisher:
        for number in range(6):
            model.step(number)
            publisher.publish(model)
            states.append(model.state())
    return DeltaLog.open(str(where)), states


def codecs(log: DeltaLog) -> set[int]:
    return {block.codec for manifest in log.manifests() for block in log.table(manifest).blocks}


def test_every_version_of_a_log_of_ctx_blocks_is_the_trainers(tmp_path: Path) -> None:
    log, states = published(tmp_path)
    assert CTX in codecs(log)
    for version, state in enumerate(states):
        found = log.materialize(version)
        assert {name: bits.tobytes() for name, (_, bits) in found.items()} == state
    assert verify.verify(log).faults == ()


def test_folds_of_ctx_blocks_are_composed_from_the_steps_that_the_publisher_had(tmp_path: Path) -> None:
    log, states = published(tmp_path, FoldSchedule(base=2, levels=2, reach=0))
    folds = log.catalog().folds
    assert folds and all(block.codec != CTX for fold in folds for block in log.table(fold).blocks)
    replica = Replica(log)
    replica.go_to(log.latest(), 6)
    assert {name: bits.tobytes() for name, (_, bits) in replica.tensors.items()} == states[-1]


@pytest.mark.parametrize(("source", "to"), [(1, 5), (5, 1), (3, 4), (4, 3)])
def test_who_folds_ctx_blocks_from_the_log_alone_rebuilds_both_versions(tmp_path: Path, source: int, to: int) -> None:
    log, states = published(tmp_path)
    fold = write_fold(log, source, to)
    held = {name: np.frombuffer(bits, np.uint16).copy() for name, bits in states[source].items()}
    table = log.table(fold)
    assert all(block.codec != CTX for block in table.blocks)
    for block, payload in log.blocks(fold, table.blocks):
        bits = held[block.spec.name][block.start : block.start + block.count]
        decoded = decode_block(block, payload, bits)
        bits[decoded.positions] = decoded.new_bits(bits[decoded.positions])
    assert {name: bits.tobytes() for name, bits in held.items()} == states[to]


def test_changes_that_deltas_do_not_tell_are_had_from_folds(tmp_path: Path) -> None:
    log, states = published(tmp_path, FoldSchedule(base=2, levels=2, reach=0))
    shelf = Shelf(log, log.latest())
    layer = shelf.layer(0, 6)
    assert (layer.source.version, layer.to.version) == (0, 6)
    wanted = {name for name in states[0] if states[0][name] != states[6][name]}
    assert set(layer.tensors) == wanted
    with pytest.raises(BaseNeeded, match="codec ctx"):
        shelf.layer(0, 5)  # no fold leads there from 4


def test_a_fold_with_ctx_blocks_is_refused(tmp_path: Path) -> None:
    log, _ = published(tmp_path)
    before, tip = log.chain(4, log.tip())
    stated = {name: getattr(tip, name) for name in ("table", "shards", "totals")}
    fold = Fold(
        source=5, to=6, before=before.state_root, after=tip.state_root, manifest=log.latest().manifest, **stated
    )
    with pytest.raises(MalformedObject, match="codec ctx, which is for deltas only"):
        log.table(fold)


@pytest.mark.parametrize("folds", [None, FoldSchedule(base=3, levels=1, reach=0)], ids=["no folds", "folds of three"])
def test_the_folds_of_a_schedule_are_written_by_going_through_the_versions(
    tmp_path: Path, folds: FoldSchedule | None
) -> None:
    log, states = published(tmp_path, folds)
    made = write_scheduled(log, FoldSchedule(base=2, levels=2, reach=0))
    assert {(fold.source, fold.to) for fold in made} == {(0, 2), (2, 4), (4, 6), (0, 4)}
    replica = Replica(log)
    hop = replica.route.next_hop(log.latest(), replica.held, 0, 6)
    assert hop is not None and hop.kind == "fold"
    replica.go_to(log.latest(), 6)
    assert {name: bits.tobytes() for name, (_, bits) in replica.tensors.items()} == states[-1]
    assert verify.verify(log).faults == ()


def resumed(where: Path, base: dict[str, torch.Tensor], folds: FoldSchedule, model: Model, numbers: range) -> DeltaLog:
    with Publisher.open(str(where), base, resume=True, folds=folds, anchors=None, max_in_flight=3) as publisher:
        for number in numbers:
            model.step(number)
            publisher.publish(model)
    return DeltaLog.open(str(where))


@pytest.mark.parametrize("first", range(12, 16))
def test_the_folds_over_the_version_at_which_a_publisher_resumed_are_written(tmp_path: Path, first: int) -> None:
    model, folds = Model(), FoldSchedule(base=4, levels=1, reach=13, stride=4)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with Publisher.open(str(tmp_path), model, folds=folds, anchors=None, max_in_flight=3) as publisher:
        for number in range(first):
            model.step(number)
            publisher.publish(model)
    log = resumed(tmp_path, base, folds, model, range(first, 28))
    assert folds.missing(log.catalog(), 1, 28) == []
    replica = Replica(log, base_of(log, base))
    replica.go_to(log.latest(), 28)
    assert {name: bits.tobytes() for name, (_, bits) in replica.tensors.items()} == model.state()


def base_of(log: DeltaLog, base: dict[str, torch.Tensor]) -> dict[str, tuple[TensorSpec, np.ndarray]]:
    bits = {name: tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16) for name, tensor in base.items()}
    return {spec.name: (spec, bits[spec.name].reshape(-1)) for spec in log.base_table().tensors}


def test_a_publisher_resumes_by_a_fold_where_a_delta_beneath_it_is_gone(tmp_path: Path) -> None:
    model, folds = Model(), FoldSchedule(base=3, levels=1, reach=0)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with Publisher.open(str(tmp_path), model, folds=folds, anchors=None) as publisher:
        for number in range(6):
            model.step(number)
            publisher.publish(model)
    lost = DeltaLog.open(str(tmp_path)).manifests()[5].shards[0].key
    next(tmp_path.rglob(lost)).unlink()
    log = resumed(tmp_path, base, folds, model, range(6, 7))
    assert log.latest().version == 7


def test_a_run_without_ctx_is_for_servers_that_split_otherwise(tmp_path: Path) -> None:
    model = Model()
    with Publisher.open(str(tmp_path), model, folds=None, anchors=None, ctx=False) as publisher:
        model.step(1)
        publisher.publish(model)
    assert CTX not in codecs(DeltaLog.open(str(tmp_path)))


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_dimension_that_a_tensor_does_not_have_is_named(tmp_path: Path, dim: int) -> None:
    model = Model()

    def split(spec: TensorSpec) -> int:
        return dim if spec.name == "up_proj.weight" else 0

    with pytest.raises(ConfigError, match=rf"ctx= tells dimension {dim} of 'up_proj.weight'"):
        Publisher.open(str(tmp_path), model, ctx=split)
    with pytest.raises(NotFound):  # nothing was begun
        DeltaLog.open(str(tmp_path))
    Publisher.open(str(tmp_path), model).close()
    with pytest.raises(ConfigError, match=rf"ctx= tells dimension {dim} of 'up_proj.weight'"):
        Publisher.open(str(tmp_path), model, resume=True, ctx=split)


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), 0),
        ("model.layers.0.self_attn.o_proj.weight", (64, 64), 1),
        ("model.layers.0.mlp.down_proj.weight", (64, 256), 1),
        ("model.layers.0.self_attn.o_proj.bias", (64,), 0),
        ("model.embed_tokens.weight", (512, 64), 0),
        ("weight", (64, 64), 0),
    ],
)
def test_row_parallel_weights_are_cut_by_columns_and_all_others_by_rows(
    name: str, shape: tuple[int, ...], dim: int
) -> None:
    assert split_dim(TensorSpec(name, "BF16", shape)) == dim
