"""LATEST can be found again from the objects of a run alone, and is never guessed between two branches."""

from __future__ import annotations

import pytest
import tiny_folds
import tiny_log

from vllm_delta_sync.errors import Unavailable, VersionGap
from vllm_delta_sync.log import LogWriter
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.repair import Node, contenders, repair_latest
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef


def write_latest(tiny: tiny_log.TinyLog, **changes: object) -> LatestPointer:
    pointer = tiny.log.latest().model_copy(update=changes)
    tiny.object("LATEST").write_bytes(pointer.to_bytes())
    return pointer


def test_a_sound_log_is_left_as_it_is(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    before = tiny.object("LATEST").read_bytes()
    found = repair_latest(tiny.log)
    assert (found.changed, found.found, found.sound, found.pointer.version) == (False, 4, 4, 3)
    assert tiny.object("LATEST").read_bytes() == before


@pytest.mark.parametrize("trouble", ["missing", "garbage", "names nothing", "rewound"])
def test_a_latest_that_leads_nowhere_or_back_comes_to_name_the_tip(tiny: tiny_log.TinyLog, trouble: str) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    tiny_folds.add_anchor(tiny, 1)
    before = tiny.log.latest()
    catalog = tiny.log.catalog()
    path = tiny.object("LATEST")
    if trouble == "missing":
        path.unlink()
    elif trouble == "garbage":
        path.write_bytes(b"{}")
    elif trouble == "names nothing":
        away = ObjectRef(key="versions/00000000000000000009/none.manifest.json", sha256="0" * 64, size=100)
        write_latest(tiny, manifest=away, version=9)
    else:
        write_latest(tiny, manifest=tiny_folds.reference(tiny, 1), version=1, sequence=2)
    found = repair_latest(tiny.log)
    assert found.changed
    now = tiny.log.latest()
    assert now == found.pointer
    assert (now.version, now.manifest, now.base) == (before.version, before.manifest, before.base)
    if trouble in ("missing", "garbage"):
        assert now.sequence >= before.sequence
    assert tiny.log.catalog() == catalog
    assert checks.verify(tiny.log).faults == ()
    tiny.writer = LogWriter.attach(tiny.log)
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 9))


def test_a_damaged_version_and_all_behind_it_are_left_out_and_the_pin_stays(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(tiny, 0, 1)
    tiny_folds.add_fold(tiny, 1, 3)
    tiny_folds.add_fold(tiny, 3, 1)
    write_latest(tiny, pin=1)
    for version in (2, 3):
        tiny_log.damage(tiny.object(tiny.log.manifest(tiny_folds.reference(tiny, version)).shards[0].key))
    tiny_log.damage(tiny.object(tiny.log.catalog().folds[1].shards[0].key))
    found = repair_latest(tiny.log)
    assert (found.pointer.version, found.pointer.pin, found.sound) == (1, 1, 2)
    assert [(fold.source, fold.to) for fold in tiny.log.catalog().folds] == [(0, 1)]
    assert checks.verify(tiny.log).faults == ()


@pytest.mark.parametrize("way", ["fold", "anchor"])
def test_a_way_around_a_damaged_version_counts(tiny: tiny_log.TinyLog, way: str) -> None:
    if way == "fold":
        tiny_folds.add_fold(tiny, 0, 2)
    else:
        tiny_folds.add_anchor(tiny, 2)
    tiny_log.damage(tiny.object(tiny.log.manifest(tiny_folds.reference(tiny, 2)).shards[0].key))
    tiny.object("LATEST").unlink()
    assert repair_latest(tiny.log).pointer.version == 3


def test_deltas_that_were_let_go_are_not_missed(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    tiny.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 2}))
    for shard in tiny.object("versions/00000000000000000001").iterdir():
        shard.unlink()
    before = tiny.log.latest()
    tiny.object("LATEST").unlink()
    now = repair_latest(tiny.log).pointer
    assert (now.manifest, now.base, now.catalog and now.catalog.sha256) == (
        before.manifest,
        before.base,
        before.catalog and before.catalog.sha256,
    )


def forked(tiny: tiny_log.TinyLog, left: int, right: int) -> list[LatestPointer]:
    """Two branches of so many versions after the tip; LATEST is unreadable. Returns what it named at each end."""
    start, models, ends = tiny.object("LATEST").read_bytes(), list(tiny.models), []
    for length, seed in ((left, 20), (right, 40)):
        tiny.object("LATEST").write_bytes(start)
        tiny.writer, tiny.models = LogWriter.attach(tiny.log), list(models)
        for number in range(length):
            tiny.publish(tiny_log.changed_model(tiny.models[-1], seed + number))
        ends.append(tiny.log.latest())
    tiny.object("LATEST").unlink()
    return ends


def test_two_branches_compete_until_one_is_named(tiny: tiny_log.TinyLog) -> None:
    left, right = forked(tiny, 2, 3)
    with pytest.raises(VersionGap, match="2 branches compete; name one of version 6") as caught:
        repair_latest(tiny.log)
    assert left.manifest.key in str(caught.value)
    assert not tiny.object("LATEST").exists()
    with pytest.raises(VersionGap, match="is not the tip of a branch that verifies"):
        repair_latest(tiny.log, to=left.base.key)
    assert repair_latest(tiny.log, to=left.manifest.key).pointer.manifest == left.manifest
    assert repair_latest(tiny.log).pointer.manifest == left.manifest, "LATEST itself tells which"
    assert repair_latest(tiny.log, to=right.manifest.key).pointer.manifest == right.manifest


def test_what_an_attempt_left_does_not_compete(tiny: tiny_log.TinyLog) -> None:
    _, right = forked(tiny, 1, 2)
    assert repair_latest(tiny.log).pointer.manifest == right.manifest


def test_what_is_published_during_a_repair_is_not_overwritten(tiny: tiny_log.TinyLog) -> None:
    tip = tiny.object("LATEST").read_bytes()
    write_latest(tiny, manifest=tiny_folds.reference(tiny, 1), version=1, sequence=2)

    def publish(*_: object) -> None:
        tiny.object("LATEST").write_bytes(tip)

    with pytest.raises(Unavailable, match="LATEST was written meanwhile"):
        repair_latest(tiny.log, progress=publish)
    assert tiny.object("LATEST").read_bytes() == tip
    assert not repair_latest(tiny.log).changed


def test_a_run_of_which_nothing_verifies_is_left_alone(tiny: tiny_log.TinyLog) -> None:
    tiny_log.damage(tiny.object(tiny.log.base().shards[0].key))
    tiny.object("LATEST").unlink()
    with pytest.raises(VersionGap, match="no version verifies from version 0 or an anchor"):
        repair_latest(tiny.log)
    assert not tiny.object("LATEST").exists()


def node(name: str, version: int, parent: str | None) -> Node:
    return Node(ObjectRef(key=name, sha256=name * 64, size=2), version, None if parent is None else parent * 64)


CHAIN = [node("a", 0, None), node("b", 1, "a"), node("c", 2, "b"), node("d", 3, "c")]


@pytest.mark.parametrize(
    ("more", "sound", "oldest", "tips"),
    [
        ([], "abcd", 0, "d"),
        ([], "abc", 0, "c"),
        ([], "acd", 0, "d"),  # an anchor leads past b
        ([node("e", 3, "c")], "abcde", 0, "de"),  # which of the two was named?
        ([node("e", 2, "b")], "abcde", 0, "d"),  # c was: d was published on it
        ([node("e", 2, "b")], "abe", 0, "b"),  # … also when it is damaged
        ([node("e", 2, "b"), node("f", 3, "e")], "abcdef", 0, "df"),
        ([node("e", 0, None)], "abcde", 0, "d"),
        ([], "", 0, ""),
        ([node("f", 5, "e")], "abdf", 3, "f"),  # b was kept for a fold, d for its child
        ([node("f", 5, "e")], "abdf", 0, "fd"),  # nothing says that e went on from d
    ],
)
def test_contenders(more: list[Node], sound: str, oldest: int, tips: str) -> None:
    found = contenders([*CHAIN, *more], {name * 64 for name in sound}, oldest)
    assert "".join(one.ref.key for one in found) == tips
