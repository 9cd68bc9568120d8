"""What goes wrong in a bucket, as a follower lives through it: it keeps the last good version, says why, and recovers.

The faults of a network are with the stores (`tests/stores`); here the store works and what it holds is wrong.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import tiny_folds
import tiny_log
from hooked_store import HookedStore

from vllm_delta_sync.errors import DeltaSyncError, RivalWriter
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.collection import collect
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.stamps import Stamps
from vllm_delta_sync.log.tail import TipWatch
from vllm_delta_sync.log.verify import verify
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest

HOUR_S = 3600.0


class Follower:
    """A replica that looks at LATEST and goes where it says, and remembers why it could not."""

    def __init__(self, tiny: tiny_log.TinyLog) -> None:
        self.tiny = tiny
        self.replica = Replica(tiny.log, tiny.base)
        self.causes: list[str] = []
        self._watch = TipWatch(tiny.log)
        self._pointer: LatestPointer | None = None

    def look(self) -> int:
        """Look once; returns the version held then."""
        try:
            self._pointer = self._watch.look() or self._pointer
            if self._pointer is not None:
                self.replica.follow(self._pointer)
        except DeltaSyncError as error:
            self.causes.append(error.cause)
        return self.replica.version

    def holds(self, model: tiny_log.Model) -> bool:
        """Whether its tensors are a model's, bit for bit."""
        return tiny_log.same(self.replica.tensors, model)


@pytest.fixture
def follower(tiny: tiny_log.TinyLog) -> Follower:
    """At version 3, the tip."""
    made = Follower(tiny)
    assert made.look() == 3
    return made


def next_model(tiny: tiny_log.TinyLog) -> tiny_log.Model:
    return tiny_log.changed_model(tiny.models[-1], seed=100 + len(tiny.models))


def publish(tiny: tiny_log.TinyLog) -> Manifest:
    return tiny.publish(next_model(tiny))


def hide(tiny: tiny_log.TinyLog, key: str) -> Path:
    """Take an object out of the bucket; returns where it is now."""
    hidden = tiny.bucket.parent / "hidden"
    shutil.move(tiny.object(key), hidden)
    return hidden


# --- LATEST ----------------------------------------------------------------------------------------------------------
def test_a_manifest_that_latest_names_and_nobody_has_is_waited_for(tiny: tiny_log.TinyLog, follower: Follower) -> None:
    published = publish(tiny)
    key = tiny.log.latest().manifest.key
    hidden = hide(tiny, key)
    assert [follower.look(), follower.look()] == [3, 3]
    assert follower.causes == ["not_found", "not_found"]
    assert follower.holds(tiny.models[3])
    shutil.move(hidden, tiny.object(key))
    assert follower.look() == published.version == 4
    assert follower.holds(tiny.models[4])


def test_a_publisher_goes_on_over_a_latest_that_was_rewound_and_no_follower_goes_back(
    tiny: tiny_log.TinyLog, follower: Follower
) -> None:
    old = tiny.log.latest()
    publish(tiny)
    assert follower.look() == 4
    tiny.say(old)
    assert [follower.look(), follower.look()] == [4, 4]
    assert follower.causes and set(follower.causes) == {"version_gap"}
    assert follower.holds(tiny.models[4])
    publish(tiny)
    assert follower.look() == 5
    assert follower.holds(tiny.models[5])
    assert not verify(tiny.log).faults


def test_a_latest_of_rubbish_is_refused_and_its_mending_followed(tiny: tiny_log.TinyLog, follower: Follower) -> None:
    good = tiny.log.latest()
    for data in (b"", b"{}", b'{"half": ', bytes(2 << 20)):
        tiny.log.store.put("LATEST", data)
        assert follower.look() == 3
    assert follower.causes == ["malformed"] * 4
    tiny.say(good)
    publish(tiny)
    assert follower.look() == 4


# --- objects ---------------------------------------------------------------------------------------------------------
def test_half_a_version_is_never_taken_and_the_other_half_is_waited_for(
    tiny: tiny_log.TinyLog, follower: Follower
) -> None:
    tiny.writer._shard_bytes = 256  # several shards
    published = publish(tiny)
    assert len(published.shards) > 2
    for key in [published.shards[0].key, published.shards[-1].key]:
        hidden = hide(tiny, key)
        assert follower.look() == 3
        assert follower.holds(tiny.models[3])
        shutil.move(hidden, tiny.object(key))
    assert follower.causes == ["not_found"] * 2
    assert follower.look() == 4
    assert follower.holds(tiny.models[4])


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap"])
def test_a_damaged_shard_is_named_and_a_fold_leads_around_it(
    tiny: tiny_log.TinyLog, follower: Follower, fault: str
) -> None:
    lost = publish(tiny)
    path = tiny.object(lost.shards[0].key)
    data = bytearray(path.read_bytes())
    if fault == "flip":
        data[-1] ^= 1
    path.write_bytes({"flip": data, "truncate": data[:-1], "swap": bytes(len(data))}[fault])
    assert [follower.look(), follower.look()] == [3, 3]
    assert follower.causes == ["digest"] * 2
    assert follower.holds(tiny.models[3])
    publish(tiny)
    assert follower.look() == 3
    tiny_folds.add_fold(tiny, 3, 5)
    assert follower.look() == 5
    assert follower.holds(tiny.models[5])


# --- two writers -----------------------------------------------------------------------------------------------------
def writers(tiny: tiny_log.TinyLog, count: int, *, conditional: bool) -> list[LogWriter]:
    """Publishers that begin at what LATEST says now, each with a store of its own."""
    stores = [HookedStore(tiny.log.store, conditional=conditional) for _ in range(count)]
    return [LogWriter.attach(DeltaLog(store, tiny.log.run)) for store in stores]


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_publishers_one_stops_at_its_next_version_and_followers_see_one_branch(
    tiny: tiny_log.TinyLog, follower: Follower, conditional: bool
) -> None:
    first, second = writers(tiny, 2, conditional=conditional)
    ours, theirs = (tiny_log.changed_model(tiny.models[3], seed) for seed in (11, 12))
    tiny_log.commit(first, tiny.models[3], ours)
    assert follower.look() == 4
    with pytest.raises(RivalWriter, match="another publisher"):
        tiny_log.commit(second, tiny.models[3], theirs)
    assert follower.look() == 4
    assert follower.holds(ours)
    later = tiny_log.changed_model(ours, 13)
    tiny_log.commit(first, ours, later)
    assert follower.look() == 5
    assert follower.holds(later)
    assert not follower.causes


def test_a_follower_on_one_branch_never_mixes_it_with_another(tiny: tiny_log.TinyLog, follower: Follower) -> None:
    fork = tiny.log.latest()
    (first,) = writers(tiny, 1, conditional=False)
    ours, theirs = (tiny_log.changed_model(tiny.models[3], seed) for seed in (11, 12))
    tiny_log.commit(first, tiny.models[3], ours)
    assert follower.look() == 4
    tiny.say(fork)  # somebody restores a backup, say, and starts another publisher from it
    (second,) = writers(tiny, 1, conditional=False)
    tiny_log.commit(second, tiny.models[3], theirs)
    tiny_log.commit(second, theirs, tiny_log.changed_model(theirs, 13))
    assert [follower.look(), follower.look()] == [4, 4]
    assert set(follower.causes) == {"version_gap"}
    assert follower.holds(ours)
    with pytest.raises(RivalWriter):
        tiny_log.commit(first, ours, tiny_log.changed_model(ours, 14))


# --- clocks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("skew", [-HOUR_S, HOUR_S])
def test_a_publishers_clock_an_hour_wrong_changes_nothing_but_what_it_says(
    tiny: tiny_log.TinyLog, follower: Follower, skew: float
) -> None:
    right = tiny.writer
    tiny.writer = LogWriter(tiny.log, right.pointer, right.tip, stamps=Stamps(now=lambda: time.time() + skew))
    created = publish(tiny).created
    tiny_folds.add_fold(tiny, 1, 4)
    assert created - time.time() == pytest.approx(skew, abs=60)
    tiny.writer = LogWriter.attach(tiny.log)
    assert publish(tiny).created - created == pytest.approx(-skew, abs=60)
    assert follower.look() == 5
    assert follower.holds(tiny.models[5])
    assert not follower.causes and not verify(tiny.log).faults


@pytest.mark.parametrize("skew", [-HOUR_S, HOUR_S])
def test_what_is_being_published_survives_a_collection_by_a_clock_an_hour_wrong(
    tiny: tiny_log.TinyLog, follower: Follower, skew: float
) -> None:
    store = tiny.log.store
    writing = put_catalog(store, tiny.log.catalog(), sequence=99).key  # as a publisher puts it before LATEST
    collected = collect(tiny.log, delete=True, clock=lambda: time.time() + skew)
    assert collected.deleted == 0
    assert store.head(writing).size > 0
    assert not verify(tiny.log).faults
    publish(tiny)
    assert follower.look() == 4
