"""Garbage collection shows what goes and why, deletes only that, and leaves every reader a way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_folds
import tiny_log
from hooked_store import HookedStore

from vllm_delta_sync.errors import ConfigError, DigestMismatch, VersionGap
from vllm_delta_sync.log import DeltaLog, history, pinning, reader
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.collection import DAY_S, collect
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.store import Store

LENGTH = 6


@pytest.fixture(scope="module")
def rich_template(tmp_path_factory: pytest.TempPathFactory) -> tiny_log.TinyLog:
    """Six versions, the folds 0→2, 2→4, 0→4 and anchors at 2 and 4."""
    tiny = tiny_log.build(tmp_path_factory.mktemp("rich"), LENGTH)
    for source, to in ((0, 2), (2, 4), (0, 4)):
        tiny_folds.add_fold(tiny, source, to)
    tiny_folds.add_anchor(tiny, 2)
    tiny_folds.add_anchor(tiny, 4)
    return tiny


@pytest.fixture
def rich(rich_template: tiny_log.TinyLog, tmp_path: Path) -> tiny_log.TinyLog:
    return tiny_log.copy(rich_template, tmp_path)


def fates(tiny: tiny_log.TinyLog, **settings: object) -> dict[str, str]:
    return {one.key: one.fate for one in collect(tiny.log, **settings).objects}  # type: ignore[arg-type]


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def put(tiny: tiny_log.TinyLog, key: str, seconds: float) -> str:
    tiny.log.store.put(key, b"left")
    age(tiny.object(key), seconds)
    return key


def test_nothing_goes_from_a_log_that_keeps_everything_but_replaced_catalogs(rich: tiny_log.TinyLog) -> None:
    found = fates(rich)
    odd = {key: fate for key, fate in found.items() if fate != "needed"}
    assert set(odd.values()) == {"young"}
    assert len(odd) == 4
    assert all(key.startswith("catalogs/") for key in odd)
    for key in odd:
        age(rich.object(key), DAY_S + 60)
    assert {key for key, fate in fates(rich).items() if fate == "leftover"} == set(odd)


def test_a_dry_run_changes_nothing(rich: tiny_log.TinyLog) -> None:
    keys, latest = list(rich.log.store.list()), rich.object("LATEST").read_bytes()
    found = collect(rich.log, keep_versions=2, keep_anchors=1, grace=0)
    assert (found.before, found.oldest, found.deleted) == (0, 4, 0)
    assert found.going
    assert (list(rich.log.store.list()), rich.object("LATEST").read_bytes()) == (keys, latest)


@pytest.mark.parametrize("keep_anchors", [0, 1, 2])
def test_after_a_collection_every_reader_has_its_way_and_the_rest_is_gone(
    rich: tiny_log.TinyLog, keep_anchors: int
) -> None:
    manifest = rich.log.manifest(tiny_folds.reference(rich, 1))
    readers = {at: Replica(rich.log, rich.base) for at in (0, 4, 5)}
    for at, replica in readers.items():
        replica.go_to(rich.log.latest(), at)
    shown = collect(rich.log, keep_versions=1, keep_anchors=keep_anchors, grace=0)
    found = collect(rich.log, keep_versions=1, keep_anchors=keep_anchors, grace=0, delete=True)
    assert found.objects == shown.objects
    assert (found.oldest, found.deleted) == (4, len(shown.going))
    left = set(rich.log.store.list())
    assert not left & {one.key for one in shown.going}
    assert manifest.shards[0].key not in left
    assert rich.log.catalog().oldest == 4
    assert len(rich.log.catalog().anchors) == keep_anchors
    assert checks.verify(rich.log).faults == ()
    pointer = rich.log.latest()
    for replica in readers.values():
        replica.follow(pointer)
        np.testing.assert_array_equal(replica.tensors["embed.weight"][1], rich.models[LENGTH]["embed.weight"][1])
    for version in (4, 5, 6):
        rich.log.materialize(version, rich.base)
    again = collect(rich.log, keep_versions=1, keep_anchors=keep_anchors, grace=0, delete=True)
    assert [one.key.split("/")[0] for one in again.going] == ["catalogs"], "the one that was replaced"
    rich.publish(tiny_log.changed_model(rich.models[-1], 80))


def test_a_log_of_more_versions_than_anybody_plans_over_is_collected_so_that_it_can_be_read_again(
    rich: tiny_log.TinyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_CHAIN", LENGTH - 1)
    with pytest.raises(VersionGap, match="let old ones go"):
        rich.log.catalog()
    assert collect(rich.log, keep_versions=1, grace=0, delete=True).oldest == 4
    assert rich.log.catalog().oldest == 4
    rich.log.materialize(LENGTH, rich.base)


def test_a_log_of_which_no_delta_is_left_is_listed_down_to_its_base(rich: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(rich, 4, LENGTH)
    assert collect(rich.log, keep_versions=0, grace=0, delete=True).oldest == LENGTH
    assert [entry.manifest.version for entry in history.entries(rich.log, rich.log.latest())] == [0]
    rich.publish(tiny_log.changed_model(rich.models[-1], 80))
    assert [entry.manifest.version for entry in history.entries(rich.log, rich.log.latest())] == [LENGTH + 1, 0]


def test_what_is_being_published_right_now_stays(rich: tiny_log.TinyLog) -> None:
    uuid = "a" * 32
    shard = f"{uuid}-00001-of-00001.safetensors"
    places = {
        f"versions/{7:020d}/{shard}": 0.0,
        f"versions/{7:020d}/{uuid}.manifest.json": 3000.0,
        f"folds/{1:020d}-{5:020d}/{shard}": 3000.0,
        f"anchors/{6:020d}/model.safetensors": 0.0,
    }
    young = [put(rich, key, seconds) for key, seconds in places.items()]
    found = fates(rich, grace=3600.0)
    assert {found[key] for key in young} == {"young"}
    found = fates(rich, grace=2000.0)
    assert [found[key] for key in young] == ["young", "leftover", "leftover", "young"]


def test_what_no_log_writes_is_left_alone_whatever_its_age(rich: tiny_log.TinyLog) -> None:
    keys = [put(rich, key, 1e8) for key in ("notes.txt", f"versions/{1:020d}/a.manifest.json", "anchors/x/y")]
    found = collect(rich.log, keep_versions=0, keep_anchors=0, grace=0, delete=True)
    assert {one.fate for one in found.objects if one.key in keys} == {"foreign"}
    assert set(keys) <= set(rich.log.store.list())


def test_nothing_is_deleted_while_a_version_that_stays_cannot_be_read(rich: tiny_log.TinyLog) -> None:
    path = rich.object(tiny_folds.reference(rich, 5).key)
    path.write_bytes(path.read_bytes()[:-1])
    keys = list(rich.log.store.list())
    with pytest.raises(DigestMismatch, match="truncated or replaced"):
        collect(rich.log, keep_versions=1, grace=0, delete=True)
    assert list(rich.log.store.list()) == keys


def test_a_pin_keeps_the_whole_catalog(rich: tiny_log.TinyLog) -> None:
    pinning.pin(rich.log, 3, rich.base, sleep=lambda _: None)
    before = rich.log.catalog()
    assert collect(rich.log, keep_versions=0, keep_anchors=0, grace=0, delete=True).oldest == 0
    assert rich.log.catalog() == before
    pointer = rich.log.latest()
    replica = Replica(rich.log, rich.base)
    replica.go_to(pointer, LENGTH)
    replica.follow(pointer)
    assert replica.version == 3


class _Undated:
    """A store that tells no times."""

    conditional = True
    metered = False

    def __init__(self, store: Store) -> None:
        self.uri, self.get, self.head, self.list = store.uri, store.get, store.head, store.list


def test_a_store_that_tells_no_times_keeps_its_leftovers(rich: tiny_log.TinyLog) -> None:
    key = put(rich, f"catalogs/{1:020d}-{'a' * 32}.json", 1e8)
    log = DeltaLog(_Undated(rich.log.store), rich.log.run)  # type: ignore[arg-type]
    found = {one.key: one.fate for one in collect(log, keep_versions=2, grace=0).objects}
    assert found[key] == "undated"
    assert "expired" in found.values()


def test_a_catalog_that_was_written_meanwhile_is_not_lost(rich: tiny_log.TinyLog) -> None:
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            tiny_folds.add_fold(rich, 4, 6)
        return time.time()

    collect(rich.log, keep_versions=2, grace=DAY_S, delete=True, clock=clock)
    assert calls == 2
    catalog = rich.log.catalog()
    assert (catalog.oldest, [(fold.source, fold.to) for fold in catalog.folds][-1]) == (4, (4, 6))
    assert checks.verify(rich.log).faults == ()


def test_nothing_is_deleted_when_a_late_write_puts_the_old_catalog_back(rich: tiny_log.TinyLog) -> None:
    log = DeltaLog(HookedStore(rich.log.store, conditional=False), rich.log.run)
    before, keys = rich.object("LATEST").read_bytes(), set(rich.log.store.list())
    times = 0

    def put_back(_: float) -> None:
        nonlocal times
        times += 1
        rich.object("LATEST").write_bytes(before)

    with pytest.raises(ConfigError, match="another catalog was written 5 times"):
        collect(log, keep_versions=1, grace=0, delete=True, sleep=put_back)
    assert times == 5
    assert keys <= set(rich.log.store.list())
    assert collect(log, keep_versions=1, grace=0, delete=True, sleep=lambda _: None).deleted
    assert checks.verify(rich.log).faults == ()


@pytest.mark.parametrize("settings", [{"keep_versions": -1}, {"keep_anchors": -1}, {"grace": -1.0}])
def test_numbers_below_zero_are_refused(rich_template: tiny_log.TinyLog, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        collect(rich_template.log, **settings)  # type: ignore[arg-type]
