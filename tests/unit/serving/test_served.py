"""A server that follows a real log: folds, pins, anchors, other runs, and faults as they show on it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serving.fleet import publish, train, weights
from tests.unit.serving.served import Served
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.log import LogWriter
from vllm_delta_sync.log.anchoring import with_anchors, write_anchor
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.collection import collect
from vllm_delta_sync.log.pinning import pin, unpin
from vllm_delta_sync.log.pointer import update
from vllm_delta_sync.serving.state import Phase
from vllm_delta_sync.wire.tensors import TensorSpec

State = dict[str, torch.Tensor]


def nowhere(_: float) -> None:
    """Instead of waiting for a publisher that there is none."""


def add_anchor(bucket: Path, version: int, base: State | None = None) -> None:
    """As the command line does; `base` where the run has no anchor of its own."""
    log = DeltaLog.open(bucket)
    given = None
    if base is not None:
        given = {
            name: (TensorSpec(name, "BF16", tuple(tensor.shape)), tensor.reshape(-1).view(torch.uint16).numpy())
            for name, tensor in base.items()
        }
    anchor = write_anchor(log, version, given)
    LogWriter.attach(log).put_catalog(lambda catalog: with_anchors(catalog, [anchor]))


def hops(served: Served) -> list[str]:
    return [record.hop for record in served.status.commits]


def following(bucket: Path, state: State, **settings: Any) -> Served:
    """A server that has done all that there was to do."""
    served = Served(bucket, state, **settings)
    served.look()
    return served


def test_a_server_far_behind_catches_up_over_folds(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=11, folds=True)
    served = following(tmp_path, states[0])
    assert served.serves(states[11]) and served.status.served == 11 and served.status.settled
    assert "fold" in hops(served) and len(hops(served)) < 8
    assert not any(rank.audit(1).wrong for rank in served.ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pin_takes_a_server_back_bit_for_bit_and_its_end_to_the_tip(tmp_path: Path, ranks: int) -> None:
    states = publish(tmp_path, weights(), steps=5)
    served = following(tmp_path, states[0], ranks=ranks)
    log = DeltaLog.open(tmp_path)
    for version in (2, 4, 1):
        pin(log, version, sleep=nowhere)
        served.look(1.0)
        assert served.serves(states[version])
        assert (served.status.served, served.status.pin, served.status.lag) == (version, version, 0)
        assert not any(rank.audit(1).wrong for rank in served.ranks)
    unpin(log, sleep=nowhere)
    served.look(1.0)
    assert served.serves(states[5]) and served.status.pin is None and served.status.failures == {}


def test_a_pinned_server_does_not_take_up_what_is_published(tmp_path: Path) -> None:
    state = weights()
    with Publisher.open(tmp_path, base=state, folds=None, anchors=None) as publisher:
        states = [copied(state)]
        for step in range(4):
            states.append(stepped(publisher, state, step))
        served = following(tmp_path, states[0])
        pin(DeltaLog.open(tmp_path), 2, sleep=nowhere)
        served.look(1.0)
        states.append(stepped(publisher, state, 9))
        served.look(1.0)
        assert served.serves(states[2]) and served.status.latest == 5
        unpin(DeltaLog.open(tmp_path), sleep=nowhere)
        served.look(1.0)
        assert served.serves(states[5])


def test_a_server_that_was_away_past_retention_recovers_by_an_anchor(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=6)
    served = following(tmp_path, states[0])
    state = copied(states[6])
    with Publisher.open(tmp_path, resume=True, base=weights(), folds=None, anchors=None) as publisher:
        for step in range(6):
            states.append(stepped(publisher, state, 20 + step))
    log = DeltaLog.open(tmp_path)
    add_anchor(tmp_path, 11)
    collect(log, keep_versions=1, keep_anchors=1, grace=0.0, delete=True)
    assert served.status.served == 6
    served.look(1.0)
    assert served.serves(states[12]) and hops(served)[6:] == ["anchor", "delta"]
    assert served.status.failures == {}
    written = served.status.commits[6].changed
    assert 0 < written < 2 * sum(tensor.numel() for tensor in state.values())  # only what differs


def test_a_server_started_on_a_checkpoint_of_a_version_that_is_gone_recovers_by_an_anchor(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=6)
    log = DeltaLog.open(tmp_path)
    add_anchor(tmp_path, 5)
    collect(log, keep_versions=1, keep_anchors=1, grace=0.0, delete=True)
    served = following(tmp_path, states[2])
    assert served.serves(states[6]) and served.passed == [5, 6]


def test_a_trainer_restarted_on_what_is_served_begins_a_run_that_the_server_joins_without_a_step(
    tmp_path: Path,
) -> None:
    states = publish(tmp_path, weights(), steps=3)
    served = following(tmp_path, states[0])
    again = publish(tmp_path, copied(states[3]), steps=1)
    served.look(60.0)
    assert served.serves(again[1])
    assert [version for _, version in served.adopted] == [0, 0] and served.passed == [1, 2, 3, 1]
    assert served.traces == 1 and served.status.run_changes == 1 and served.status.failures == {}
    assert served.status.run == served.status.served_run == DeltaLog.open(tmp_path).run


def test_a_run_that_begins_elsewhere_is_reached_by_the_anchor_of_its_base(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=3)
    served = following(tmp_path, states[0])
    other = publish(tmp_path, weights(seed=5), steps=2)
    served.look(60.0)
    assert served.serves(other[2]) and served.passed == [1, 2, 3, 0, 1, 2]
    assert hops(served)[3] == "anchor" and served.status.failures == {}
    assert not any(rank.audit(1).wrong for rank in served.ranks)


def test_a_run_whose_base_is_nowhere_to_be_had_is_named_while_the_old_one_is_served(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=3)
    served = following(tmp_path, states[0])
    other = publish(tmp_path, weights(seed=5), steps=1, anchor="never")
    served.look(60.0)
    assert served.serves(states[3]) and served.status.served == 3
    assert served.status.failures == {"base_mismatch": 1} and served.status.phase is Phase.FOLLOWING
    assert served.status.lag is None  # versions of two runs cannot be counted against each other
    add_anchor(tmp_path, 1, other[0])
    served.look(1.0)
    assert served.serves(other[1])


def test_a_server_started_on_other_weights_recovers_or_is_refused_at_once(tmp_path: Path) -> None:
    states = publish(tmp_path / "with", weights(), steps=2)
    served = following(tmp_path / "with", weights(seed=9))
    assert served.serves(states[2]) and served.status.settled
    publish(tmp_path / "without", weights(), steps=2, anchor="never")
    refused = following(tmp_path / "without", weights(seed=9))
    assert refused.status.phase is Phase.HALTED and refused.status.failures == {"base_mismatch": 1}
    assert refused.serves(weights(seed=9))


def test_a_damaged_fold_is_gone_around_and_named(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=8, folds=True)
    for path in tmp_path.rglob("folds/*-*/*.safetensors"):
        flip(path)
    served = following(tmp_path, states[0])
    for _ in range(12):
        served.look(60.0)
    assert served.serves(states[8]) and set(hops(served)) == {"delta"}
    assert set(served.status.failures) == {"digest"}


def test_a_changed_element_more_than_may_wait_is_refused_by_name_and_nothing_moves(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    served = following(tmp_path, states[0], limit=100)
    assert served.serves(states[0]) and served.status.failures == {"staging_limit": 1}


def test_folds_that_change_more_than_may_wait_are_gone_around_by_smaller_steps(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=8, folds=True)
    elements = sum(parameter.numel() for parameter in Served(tmp_path, states[0]).models[0].parameters())
    # A delta changes a fifth of the elements, a fold of eight more than four fifths; each takes 8 bytes or more.
    served = following(tmp_path, states[0], limit=elements * 8 * 2 // 5)
    assert served.status.served == 0 and served.status.failures == {"staging_limit": 1}
    for _ in range(3):
        served.look(5.0)
    assert served.serves(states[8])
    assert set(served.status.failures) == {"staging_limit"} and served.status.failures["staging_limit"] <= 3
    assert "delta" in hops(served)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


@pytest.mark.parametrize(
    ("what", "damage", "cause"),
    [
        ("*.safetensors", flip, "digest"),
        ("*.safetensors", shorter, "digest"),
        ("*.safetensors", other, "digest"),
        ("*.safetensors", Path.unlink, "not_found"),
        ("*.manifest.json", flip, "digest"),
        ("*.manifest.json", longer, "digest"),
        ("*.manifest.json", shorter, "digest"),
        ("*.manifest.json", Path.unlink, "not_found"),
    ],
)
def test_a_damaged_object_is_named_and_taken_up_when_it_is_whole_again(
    tmp_path: Path, what: str, damage: Callable[[Path], None], cause: str
) -> None:
    state = weights()
    with Publisher.open(tmp_path, base=state, folds=None, anchors=None) as publisher:
        before = stepped(publisher, state, 1)
        served = following(tmp_path, weights())
        after = stepped(publisher, state, 2)
    (path,) = tmp_path.glob(f"*/versions/{2:020d}/{what}")
    good = path.read_bytes()
    damage(path)
    served.look(1.0)
    assert served.serves(before) and served.status.served == 1
    assert served.status.failures == {cause: 1} and path.name in str(served.status.last_error)
    path.write_bytes(good)
    served.look(60.0)
    assert served.serves(after) and served.status.served == 2


def test_a_latest_that_went_back_is_named_and_what_is_served_stays(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=1)
    early = next(tmp_path.glob("*/LATEST")).read_bytes()
    state = copied(states[1])
    with Publisher.open(tmp_path, resume=True, base=weights(), folds=None, anchors=None) as publisher:
        late = stepped(publisher, state, 2)
    served = following(tmp_path, states[0])
    latest = next(tmp_path.glob("*/LATEST"))
    good = latest.read_bytes()
    latest.write_bytes(early)
    served.look(1.0)
    assert served.serves(late) and served.status.failures == {"version_gap": 1}
    assert "LATEST went back from version 2 to 1" in str(served.status.last_error)
    latest.write_bytes(good)
    served.look(1.0)
    assert served.status.served == 2 and served.status.lag == 0


def test_a_disk_that_is_full_costs_the_cache_and_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = publish(tmp_path / "bucket", weights(), steps=1)

    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    served = following(tmp_path / "bucket", states[0], cache=NodeCache(tmp_path / "cache", 1 << 30))
    assert served.serves(states[1]) and served.status.served == 1
    assert set(served.status.failures) == {"cache"} and "No space left" in str(served.status.last_error)


def test_clocks_an_hour_apart_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, state = time.time, weights()
    with Publisher.open(tmp_path, base=state, folds=None, anchors=None) as publisher:
        stepped(publisher, state, 1)
        served = following(tmp_path, weights())
        for skew in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
            after = stepped(publisher, state, 2)
            monkeypatch.setattr(time, "time", real)
            served.look(1.0)
            assert served.serves(after) and served.status.failures == {}


def test_a_fork_is_never_mixed_in(tmp_path: Path) -> None:
    states = publish(tmp_path, weights(), steps=2, anchor="never")
    served = following(tmp_path, states[0])
    log = DeltaLog.open(tmp_path)
    # Somebody takes LATEST back and goes on from there: the versions after it are of another branch.
    ref = log.tip().parent
    update(log, lambda latest: latest.model_copy(update={"version": 1, "manifest": ref}))
    state = copied(states[1])
    with Publisher.open(tmp_path, resume=True, base=weights(), folds=None, anchors=None) as rival:
        for step in (7, 8, 9):
            stepped(rival, state, step)
    for _ in range(4):
        served.look(60.0)
    assert served.serves(states[2]) and served.status.served == 2
    assert set(served.status.failures) == {"version_gap"} and "branch" in str(served.status.last_error)
    add_anchor(tmp_path, 4, weights())
    served.look(60.0)
    assert served.serves(state)  # whole, by an anchor


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def stepped(publisher: Publisher, state: State, step: int) -> State:
    """Train, publish and return a copy of what was published."""
    train(state, step)
    publisher.publish(state).result(timeout=60)
    return copied(state)
