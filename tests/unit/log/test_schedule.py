"""Which folds are written, which a catalog keeps, and when an anchor is due."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log.schedule import NEAR, AnchorPolicy, FoldSchedule, prune, with_folds
from vllm_delta_sync.wire.catalog import Anchor, Catalog, Fold
from vllm_delta_sync.wire.manifest import AnchorFile, AnchorRef, Found, ObjectRef, ShardRef, TableRef, Totals

RUN, SHA = "0" * 32, "0" * 64
PLAIN = FoldSchedule(base=2, levels=3, reach=0)
OVERLAPPING = FoldSchedule(base=2, levels=2, reach=11, stride=3)


def fold(source: int, to: int, size: int = 100) -> Fold:
    return Fold(
        source=source,
        to=to,
        before=SHA,
        after=SHA,
        manifest=ObjectRef(key=f"versions/{to}", sha256=SHA, size=2),
        table=TableRef(start=8, size=10, sha256=SHA),
        shards=(ShardRef(key=f"folds/{source}-{to}", sha256=SHA, size=size, data_start=18),),
        totals=Totals(tensors=1, elements=1, changed=1, bytes=size),
    )


def anchor(version: int) -> Anchor:
    prefix = f"anchors/{version}"
    return Anchor(
        version=version,
        state_root=SHA,
        manifest=ObjectRef(key=f"versions/{version}", sha256=SHA, size=2),
        checkpoint=AnchorRef(prefix=prefix, files=(AnchorFile(key=f"{prefix}/m", sha256=SHA, size=9),)),
        table=Found(key=f"{prefix}/t", sha256=SHA, size=9),
        bytes=9,
    )


def catalog(*ends: tuple[int, int], oldest: int = 0, anchors: tuple[int, ...] = ()) -> Catalog:
    return Catalog(
        run=RUN, oldest=oldest, folds=tuple(fold(*pair) for pair in ends), anchors=tuple(map(anchor, anchors))
    )


def ends(found: Catalog) -> set[tuple[int, int]]:
    return {(entry.source, entry.to) for entry in found.folds}


@pytest.mark.parametrize(
    ("schedule", "version", "waiting", "lengths"),
    [
        (PLAIN, 0, (), ()),
        (PLAIN, 1, (), ()),
        (PLAIN, 2, (), (2,)),
        (PLAIN, 4, (), (2, 4)),
        (PLAIN, 6, (), (2,)),
        (PLAIN, 8, (), (2, 4, 8)),
        (PLAIN, 16, (), (2, 4, 8)),
        (FoldSchedule(base=4, levels=2, reach=0), 16, (), (4, 16)),
        (FoldSchedule(base=3, levels=2, reach=0), 8, (), ()),
        (FoldSchedule(levels=0, reach=11, stride=1), 12, (), (11,)),
        (OVERLAPPING, 6, (), (2, 6)),  # a fold of 9 would begin before version 0
        (OVERLAPPING, 9, (), (9,)),
        (OVERLAPPING, 12, (), (2, 4, 9)),
        (OVERLAPPING, 12, (13, 14), (2, 4, 9)),
        (OVERLAPPING, 12, (13, 14, 15), (2, 4)),
        (FoldSchedule(base=2, levels=3, reach=10, stride=3), 24, (), (2, 4, 8)),  # both kinds have a fold of 8
        (FoldSchedule(), 3, (), (3,)),  # in a young run long ones begin at the base
        (FoldSchedule(), 10, (), (10,)),
        (FoldSchedule(), 94, (), (94,)),
        (FoldSchedule(), 97, (), (3,)),  # from where one of 94 ends
        (FoldSchedule(), 98, (), (7,)),  # to where one of 94 begins
        (FoldSchedule(), 99, (), ()),
        (FoldSchedule(), 100, (), ()),
        (FoldSchedule(), 101, (), (94,)),
        (FoldSchedule(), 101, (104, 107), (94,)),
        (FoldSchedule(), 101, (107, 108), ()),
        (
            FoldSchedule(levels=0, reach=60, stride=6),
            61,
            (),
            (55,),
        ),  # a short one would be on no way but of one version
    ],
)
def test_the_lengths_of_the_folds_that_end_at_a_version(
    schedule: FoldSchedule, version: int, waiting: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    assert schedule.lengths(version, waiting) == lengths


@pytest.mark.parametrize(
    "numbers",
    [{"base": 1}, {"levels": -1}, {"levels": 21}, {"reach": 5, "stride": 5}, {"stride": 0}, {"reach": (1 << 20) + 1}],
    ids=str,
)
def test_a_schedule_that_makes_no_sense_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        FoldSchedule(**numbers)


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 12), st.integers(40, 120), st.data())
def test_whoever_is_as_far_behind_as_the_reach_finds_a_long_fold_and_a_short_one_on_its_way(
    stride: int, reach: int, data: st.DataObject
) -> None:
    schedule = FoldSchedule(levels=0, reach=reach, stride=stride)
    start = data.draw(st.integers(reach, reach + 2 * stride))
    found = [
        (to - length, to)
        for to in range(start, start + reach + 1)
        for length in schedule.lengths(to)
        if to - length >= start
    ]
    (long,) = (ends for ends in found if ends[1] - ends[0] == reach - stride + 1)
    short = min(long[1] % stride, stride - long[1] % stride)
    if short > 1:
        assert any(ends[1] - ends[0] == short and (ends[1] <= long[0] or ends[0] >= long[1]) for ends in found)


def test_the_folds_end_to_end_lead_to_where_long_ones_begin() -> None:
    schedule = FoldSchedule()
    to_there = {to for to in range(1, 400) if schedule.base in schedule.lengths(to)}
    begins = {to - schedule.longest for to in range(1, 400) if schedule.longest in schedule.lengths(to)}
    assert len(begins) > 40
    assert begins - {0} <= to_there


@pytest.mark.parametrize(
    ("folded", "full", "due"),
    [(49, 100, False), (50, 100, False), (51, 100, True), (None, 100, True), (0, 0, False)],
)
def test_an_anchor_is_due_when_the_fold_costs_more_than_its_share(folded: int | None, full: int, due: bool) -> None:
    assert AnchorPolicy(share=0.5).due(folded, full) is due


@pytest.mark.parametrize("numbers", [{"share": 0.0}, {"share": 1.1}, {"every": 0}], ids=str)
def test_an_anchor_policy_that_makes_no_sense_is_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        AnchorPolicy(**numbers)  # type: ignore[arg-type]


def test_a_fold_takes_the_place_of_one_between_the_same_versions() -> None:
    found = with_folds(catalog((0, 2), (2, 4)), [fold(2, 4, 200), fold(4, 6)])
    assert [(entry.source, entry.to, entry.totals.bytes) for entry in found.folds] == [
        (0, 2, 100),
        (2, 4, 200),
        (4, 6, 100),
    ]


FAR = NEAR + 1000


@pytest.mark.parametrize(
    ("before", "tip", "pin", "kept"),
    [
        pytest.param(catalog((0, 2), (2, 4), (0, 4)), 4, None, {(0, 2), (2, 4), (0, 4)}, id="near ones stay"),
        pytest.param(catalog((10, 12), (8, 12)), FAR, None, {(8, 12)}, id="of old ones the longest stay"),
        pytest.param(
            catalog((8, 12), (9, 13), (12, 16), (12, 14)), FAR, None, {(8, 12), (12, 16)}, id="as a chain end to end"
        ),
        pytest.param(catalog((0, 4), (0, 8), (4, 8)), FAR, None, {(0, 8), (4, 8)}, id="from the base the furthest"),
        pytest.param(
            catalog((50, 60), (50, 70), anchors=(50,)), FAR, None, {(50, 70)}, id="from an anchor the furthest"
        ),
        pytest.param(
            catalog((0, 900), (0, 20), (20, 40), oldest=40), FAR, None, {(0, 900), (0, 20), (20, 40)},
            id="the way to the oldest delta",
        ),
        pytest.param(catalog((1100, 8), (90, 8)), FAR, None, {(1100, 8)}, id="a way back from near the tip stays"),
        pytest.param(catalog((90, 8), (10, 12), (8, 12)), FAR, 8, {(90, 8), (10, 12), (8, 12)}, id="pinned: all stay"),
    ],
)  # fmt: skip
def test_what_a_catalog_keeps(before: Catalog, tip: int, pin: int | None, kept: set[tuple[int, int]]) -> None:
    assert ends(prune(before, tip, pin)) == kept


def test_a_catalog_keeps_to_its_room_and_lets_go_of_what_ended_first() -> None:
    before = catalog((0, 8), *((at, at + 2) for at in range(100, 140)))
    room = len(before.to_bytes()) // 2
    found = prune(before, 140, room=room)
    assert len(found.to_bytes()) <= room
    left = sorted(ends(found))
    assert left[0] == (0, 8)
    assert left[1:] == [(at, at + 2) for at in range(left[1][0], 140)]
    assert len(left) > 10


def test_old_anchors_go_before_they_take_the_room_of_the_folds_near_the_tip() -> None:
    near = [(at, at + 2) for at in range(990, 1000)]
    before = catalog(*near, anchors=tuple(range(100, 1000, 10)))
    room = len(before.to_bytes()) // 3
    found = prune(before, 1001, room=room)
    assert len(found.to_bytes()) <= room
    left = [entry.version for entry in found.anchors]
    assert left == list(range(left[0], 1000, 10))
    assert len(left) > 10
    assert ends(found) == set(near)


def test_the_newest_anchor_stays_as_long_as_there_is_room_for_it() -> None:
    before = catalog(anchors=(10, 20))
    room = len(catalog(anchors=(20,)).to_bytes())
    assert [entry.version for entry in prune(before, 30, room=room).anchors] == [20]
    assert prune(before, 30, 10, room).anchors == before.anchors, "one may be the way to a pinned version"


@pytest.mark.parametrize("tip", [1, 300, 1201])
def test_a_long_run_keeps_a_small_catalog_in_which_everything_near_is_reached(tip: int) -> None:
    schedule = FoldSchedule()
    found = Catalog(run=RUN)
    for first in range(0, tip, 500):  # as a publisher does, in larger steps
        last = min(first + 500, tip)
        made = [fold(to - length, to) for to in range(first + 1, last + 1) for length in schedule.lengths(to)]
        found = prune(with_folds(found, made), last)
    assert len(found.to_bytes()) < 1 << 19
    wanted = {(to - length, to) for to in range(max(1, tip - NEAR), tip + 1) for length in schedule.lengths(to)}
    assert wanted <= ends(found)
