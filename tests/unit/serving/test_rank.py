"""Ranks follow a log bit for bit, or refuse and stay as they were."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serving.fleet import Following, publish, train, weights
from vllm_delta_sync import Publisher
from vllm_delta_sync.errors import (
    DigestMismatch,
    Poisoned,
    StagingLimit,
    StateError,
    StateHashMismatch,
    StrayWrite,
    UnsupportedLayout,
    VersionGap,
)
from vllm_delta_sync.serving.dump import dump
from vllm_delta_sync.serving.messages import Located


def place(located: Located) -> int | None:
    return located.place.version if located.place else None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["auto", "reference"])
def test_live_weights_equal_the_trainers_at_every_version(tmp_path: Path, ranks: int, policy: str) -> None:
    base = weights()
    states = publish(tmp_path, weights(), steps=4)
    fleet = Following(tmp_path, base, ranks, policy)
    assert place(fleet.join()) == 0
    for hop in fleet.deltas():
        fleet.take(hop)
        assert fleet.serves(states[hop.to])
        assert not any(rank.audit(1).wrong for rank in fleet.ranks)


def test_special_bits_arrive_unchanged(tmp_path: Path) -> None:
    base = weights()
    state = weights()
    special = torch.tensor([0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x7F7F], dtype=torch.uint16)
    with Publisher.open(tmp_path, base=state) as publisher:
        state["q"].view(-1)[3:11] = special.view(torch.bfloat16)
        state["bias"][:8] = special.view(torch.bfloat16)
        publisher.publish(state)
    fleet = Following(tmp_path, base)
    fleet.join()
    fleet.follow()
    assert fleet.serves(state)


def test_a_server_with_a_later_checkpoint_finds_its_place(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=3)
    fleet = Following(tmp_path, states[2])
    assert place(fleet.join()) == 2
    fleet.follow()
    assert fleet.serves(states[3])


def test_a_wrong_base_is_refused_and_a_tensor_is_named(tmp_path: Path) -> None:
    publish(tmp_path, weights(), steps=1)
    other = weights()
    other["o_proj.weight"][3, 3] += 1
    located = Following(tmp_path, other).join()
    assert located.place is None and "'o_proj.weight'" in located.text


def test_a_version_that_skips_one_is_refused(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=2)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    with pytest.raises(VersionGap, match="begins at version 1; held are version 0"):
        fleet.stage(fleet.deltas()[1])
    fleet.follow()
    assert fleet.serves(states[2])


def test_a_commit_of_what_is_not_staged_is_refused(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    with pytest.raises(StateError, match="not staged"):
        fleet.commit(1)
    fleet.stage(fleet.deltas()[0])
    fleet.ranks[0].drop()
    with pytest.raises(StateError, match="not staged"):
        fleet.commit(1)
    assert fleet.serves(states[0])


def test_a_stray_write_between_stage_and_commit_is_seen_and_nothing_is_written(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0], ranks=1)
    fleet.join()
    fleet.stage(fleet.deltas()[0])
    fleet.models[0].qkv.view(-1)[0] += 1  # the first element of q changes in every step
    before = [parameter.clone() for parameter in fleet.models[0].parameters()]
    with pytest.raises(StrayWrite):
        fleet.commit(1)
    for live, was in zip(fleet.models[0].parameters(), before, strict=True):
        assert torch.equal(live, was)
    assert fleet.ranks[0].version == 0


def test_a_stray_write_before_staging_is_seen_by_the_hash(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    fleet.models[1].o.data[0, 0] += 1
    fleet.models[0].o.data[0, 0] += 1  # the first element of o changes in every step
    with pytest.raises(StateHashMismatch, match=r"'o_proj\.weight'"):
        fleet.stage(fleet.deltas()[0])


def test_a_copy_that_went_astray_is_seen_by_the_hash(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    fleet.models[1].norm.data[0] += 1
    with pytest.raises(StateHashMismatch, match=r"'norm' on rank 1"):
        fleet.stage(fleet.deltas()[0])


def test_a_rank_that_committed_goes_back_when_another_could_not(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    fleet.stage(fleet.deltas()[0])
    fleet.ranks[0].commit(1)
    for rank in fleet.ranks:
        rank.rollback(1)
    assert fleet.serves(states[0]) and [rank.version for rank in fleet.ranks] == [0, 0]
    assert not any(rank.audit(1).wrong for rank in fleet.ranks)
    fleet.follow()
    assert fleet.serves(states[1])


def test_a_replaced_parameter_is_noticed_before_the_commit(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0], ranks=1)
    fleet.join()
    fleet.stage(fleet.deltas()[0])
    fleet.models[0].norm.data = fleet.models[0].norm.data.clone()
    with pytest.raises(UnsupportedLayout, match="norm"):
        fleet.commit(1)


def test_parameters_stay_where_they_are(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=3)
    fleet = Following(tmp_path, states[0])
    places = [p.data_ptr() for model in fleet.models for p in model.parameters()]
    fleet.join()
    fleet.follow()
    assert places == [p.data_ptr() for model in fleet.models for p in model.parameters()]


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_shard_is_refused_by_name_and_followed_once_it_is_whole_again(tmp_path: Path, damage: str) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    shards = [path for path in tmp_path.rglob("*.safetensors") if path.parent.name == f"{1:020d}"]
    good = shards[0].read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    shards[0].write_bytes(bytes(bad) if damage == "flip" else good[:-3])
    with pytest.raises(DigestMismatch, match=shards[0].name):
        fleet.stage(fleet.deltas()[0])
    assert fleet.serves(states[0])
    shards[0].write_bytes(good)
    fleet.follow()
    assert fleet.serves(states[1])


def test_an_audit_finds_a_single_flipped_bit(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    fleet.follow()
    fleet.models[1].qkv.view(torch.int16).view(-1)[7] ^= 1
    found = [rank.audit(1).wrong for rank in fleet.ranks]
    assert found == [(), ("q",)]


def test_an_audit_accounts_for_commits_that_land_in_between(tmp_path: Path) -> None:
    state = weights()
    fleet_state = weights()
    with Publisher.open(tmp_path, base=state) as publisher:
        for step in range(40):
            train(state, step)
            publisher.publish(state)
    fleet = Following(tmp_path, fleet_state, ranks=1)
    fleet.join()
    outcomes = []
    done = threading.Event()

    def audit() -> None:
        while not done.is_set():
            outcomes.append(fleet.ranks[0].audit(1))

    auditor = threading.Thread(target=audit)
    auditor.start()
    fleet.follow()
    done.set()
    auditor.join()
    assert fleet.serves(state)
    assert len(outcomes) > 3 and not any(outcome.wrong for outcome in outcomes)


def test_an_element_that_a_commit_writes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0], ranks=1)
    fleet.join()
    fleet.stage(fleet.deltas()[0])
    rank = fleet.ranks[0]
    memory = rank.memory
    assert memory is not None
    real, waiting = memory.hash, [1]

    def interrupted(region: Any, dtype: str, seed: Any) -> Any:
        if region.tensor == "bias" and waiting:  # kept as fp32, of which the commit had written one half
            fleet.commit(waiting.pop())
            raise StateHashMismatch("half an element")
        return real(region, dtype, seed)

    memory.hash = interrupted  # type: ignore[method-assign]
    assert rank.audit(1).wrong == () and fleet.serves(states[1])


def test_a_dump_holds_the_slices_of_the_checkpoint(tmp_path: Path) -> None:
    states = publish(tmp_path / "bucket", weights(), steps=2)
    fleet = Following(tmp_path / "bucket", states[0])
    fleet.join()
    fleet.follow()
    for rank in fleet.ranks:
        index = json.loads(dump(rank, str(tmp_path / "dump")).read_text())
        data = (tmp_path / "dump" / f"rank{rank.number}.bin").read_bytes()
        assert index["version"] == 2 and len(index["regions"]) == 8
        for entry in index["regions"]:
            box = tuple(slice(a, b) for a, b in entry["box"])
            wanted = states[2][entry["tensor"]].view(torch.int16).numpy()[box].tobytes()
            assert data[entry["offset"] : entry["offset"] + entry["nbytes"]] == wanted


def test_a_version_of_another_branch_is_refused(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0])
    fleet.join()
    (hop,) = fleet.deltas()
    assert hop.parent is not None
    with pytest.raises(VersionGap, match="does not follow what is served"):
        fleet.stage(hop.model_copy(update={"parent": hop.parent.model_copy(update={"sha256": "0" * 64})}))
    with pytest.raises(DigestMismatch, match="leads to state root"):
        fleet.stage(hop.model_copy(update={"after": "0" * 64}))
    fleet.take(hop)
    assert fleet.serves(states[1])


class _Failing:
    """Kernels of which one kind of call fails, as a device that is out of memory does."""

    def __init__(self, real: Any, widths: tuple[int, ...], *, undo_too: bool) -> None:
        self.real, self.widths, self.undo_too, self.calls = real, widths, undo_too, 0
        self.name, self.reason = real.name, real.reason

    def scatter(self, patch: Any) -> int:
        self.calls += 1
        if patch.width in self.widths or (self.undo_too and self.calls > 1):
            raise RuntimeError("out of memory")
        return int(self.real.scatter(patch))


@pytest.mark.parametrize(("undo_too", "error"), [(False, RuntimeError), (True, Poisoned)])
def test_a_kernel_that_fails_halfway_leaves_nothing_written_or_says_so(
    tmp_path: Path, undo_too: bool, error: type[Exception]
) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0], ranks=1)
    fleet.join()
    fleet.stage(fleet.deltas()[0])
    memory = fleet.ranks[0].memory
    assert memory is not None
    real = memory._backend
    memory._backend = _Failing(real, (4,), undo_too=undo_too)  # type: ignore[assignment]
    with pytest.raises(error):
        fleet.commit(1)
    assert fleet.serves(states[0]) is not undo_too and fleet.ranks[0].version == 0
    if not undo_too:
        memory._backend = real
        fleet.commit(1)
        assert fleet.serves(states[1])


def test_an_audit_counts_a_widened_element_that_no_published_value_can_be(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0], ranks=1)
    fleet.join()
    fleet.models[0].bias.view(torch.int32)[3] ^= 1
    assert fleet.ranks[0].audit(1).wrong == ("bias",)


def test_a_step_that_changes_more_than_may_wait_is_refused_by_name(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    fleet = Following(tmp_path, states[0], limit=64)
    fleet.join()
    with pytest.raises(StagingLimit, match="max_staged_bytes = 64"):
        fleet.stage(fleet.deltas()[0])
    assert fleet.serves(states[0]) and fleet.ranks[0].staged_version is None
