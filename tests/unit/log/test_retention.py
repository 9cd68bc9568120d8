"""Retention takes no way from a reader that may need it, and deletes nothing by guess."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folds import RUN, UUID, stated_anchor, stated_fold

from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.log import names, schedule
from vllm_delta_sync.log.plan import Edge, admissible, plan
from vllm_delta_sync.log.retention import retain, sort_keys, unreferenced
from vllm_delta_sync.log.schedule import prune
from vllm_delta_sync.wire.catalog import Catalog


def edges(catalog: Catalog, tip: int) -> list[Edge]:
    return [
        *(Edge(one.source, one.to, one.totals.bytes) for one in catalog.folds),
        *(Edge(None, one.version, one.bytes) for one in catalog.anchors),
        *(Edge(version - 1, version, 10) for version in range(catalog.oldest + 1, tip + 1)),
    ]


def leads(graph: list[Edge], held: int | None, goal: int) -> bool:
    try:
        plan(graph, held, goal)
    except VersionGap:
        return False
    return True


@st.composite
def logs(draw: st.DrawFn) -> tuple[Catalog, int]:
    """A catalog in which the deltas begin where something leads, and the tip."""
    tip = draw(st.integers(1, 12))
    versions = st.integers(0, tip)
    ends = draw(
        st.lists(st.tuples(versions, versions).filter(lambda pair: pair[0] != pair[1]), max_size=8, unique=True)
    )
    anchors = draw(st.lists(st.integers(1, tip), max_size=4, unique=True))
    oldest = draw(versions)
    catalog = Catalog(
        run=RUN,
        oldest=oldest,
        folds=tuple(stated_fold(source, to, 10 + 5 * abs(to - source)) for source, to in ends),
        anchors=tuple(map(stated_anchor, anchors)),
    )
    graph = [*edges(catalog, tip), Edge(None, 0, 0)]
    forward = [edge for edge in graph if edge.source is None or edge.to > edge.source]
    if not leads(forward, None, oldest):
        catalog = catalog.model_copy(update={"oldest": 0})
    return catalog, tip


@settings(max_examples=50, deadline=None)
@given(logs(), st.none() | st.integers(0, 12), st.integers(0, 3))
def test_every_reader_that_is_kept_still_reaches_the_tip_and_each_kept_version(
    log: tuple[Catalog, int], keep_versions: int | None, keep_anchors: int
) -> None:
    before, tip = log
    after = retain(before, tip, keep_versions=keep_versions, keep_anchors=keep_anchors)
    graph = edges(after, tip)
    readers = {0, *range(after.oldest, tip + 1), *(one.version for one in after.anchors)}
    onward = [edge for edge in edges(before, tip) if edge.source is None or edge.source < edge.to]
    assert all(
        leads(admissible(graph, reader, tip), reader, tip)
        for reader in readers
        if leads(admissible(onward, reader, tip), reader, tip)
    )
    assert leads(graph, 0, tip)
    start = [*graph, Edge(None, 0, 0)]
    assert all(leads(start, None, goal) for goal in range(after.oldest, tip + 1))
    assert after.oldest >= before.oldest
    assert set(after.folds) <= set(before.folds)
    assert len(after.anchors) >= min(keep_anchors, len(before.anchors))


@pytest.mark.parametrize("anchors", [[], [3]])
@pytest.mark.parametrize("later", [(0, 6), (3, 7), (2, 9)])
def test_a_publisher_that_prunes_its_folds_afterwards_keeps_the_way_to_where_the_deltas_begin(
    anchors: list[int], later: tuple[int, int]
) -> None:
    folds = [stated_fold(*ends) for ends in ((0, 3), (3, 4), later)]
    kept = Catalog(run=RUN, oldest=4, folds=tuple(folds), anchors=tuple(map(stated_anchor, anchors)))
    after = prune(kept, 10 + schedule.NEAR)
    graph = [*edges(after, 10), Edge(None, 0, 0)]
    assert all(leads(graph, None, goal) for goal in range(4, 11))


@pytest.mark.parametrize(
    ("folds", "anchors", "oldest", "keep_versions", "keep_anchors", "left"),
    [
        # Nothing leads around the deltas: all of them stay.
        ([], [], 0, 5, 2, (0, [], [])),
        # A fold does, up to 16; the one inside has no reader any more.
        ([(0, 16), (8, 16), (16, 20)], [], 0, 4, 2, (16, [(0, 16), (16, 20)], [])),
        # An anchor does. Readers at version 0 go over it.
        ([(0, 4)], [14], 0, 5, 2, (14, [], [14])),
        # Anchors beyond the newest two go.
        ([], [4, 8, 14], 0, 5, 2, (14, [], [8, 14])),
        # … but not the one from which the deltas begin.
        ([], [4, 8, 14], 4, None, 1, (4, [], [4, 14])),
        # Nobody goes back when nothing is pinned.
        ([(0, 8), (20, 9)], [], 0, None, 2, (0, [(0, 8)], [])),
        # No number of versions: the deltas all stay.
        ([(0, 16)], [18], 0, None, 2, (0, [(0, 16)], [18])),
    ],
)
def test_what_is_left(
    folds: list[tuple[int, int]],
    anchors: list[int],
    oldest: int,
    keep_versions: int | None,
    keep_anchors: int,
    left: tuple[int, list[tuple[int, int]], list[int]],
) -> None:
    before = Catalog(
        run=RUN,
        oldest=oldest,
        folds=tuple(itertools.starmap(stated_fold, folds)),
        anchors=tuple(map(stated_anchor, anchors)),
    )
    after = retain(before, 20, keep_versions=keep_versions, keep_anchors=keep_anchors)
    assert (
        after.oldest,
        [(one.source, one.to) for one in after.folds],
        [one.version for one in after.anchors],
    ) == left


SHARD = f"{UUID}-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("key", "age", "fate"),
    [
        ("LATEST", None, "needed"),
        (names.manifest(9, UUID), 1e9, "needed"),
        (names.manifest(3, UUID), None, "expired"),
        (f"{names.version_prefix(5)}/{SHARD}", 0.0, "expired"),
        (f"{names.version_prefix(6)}/{SHARD}", 1e9, "leftover"),
        (f"{names.version_prefix(6)}/{SHARD}", 59.0, "young"),
        (f"{names.version_prefix(6)}/{SHARD}", None, "undated"),
        (f"{names.fold_prefix(1, 2)}/{SHARD}", 0.0, "expired"),
        (f"{names.fold_prefix(1, 4)}/{SHARD}", 0.0, "young"),
        (f"{names.anchor(4)}/model.safetensors", 61.0, "leftover"),
        (names.catalog(7, UUID), 61.0, "leftover"),
        (f"{names.version_prefix(1)}/notes.txt", 1e9, "foreign"),
        (f"{names.version_prefix(1)}/{UUID}.manifest.json.bak", 1e9, "foreign"),
        (f"{names.anchor(4)}/sub/model.safetensors", 1e9, "foreign"),
        ("README.md", 1e9, "foreign"),
    ],
)
def test_the_fate_of_a_key(key: str, age: float | None, fate: str) -> None:
    needed, dropped = {names.manifest(9, UUID)}, {f"{names.fold_prefix(1, 2)}/{SHARD}"}
    (found,) = sort_keys([key], needed, dropped, 5, {} if age is None else {key: age}, 60.0)
    assert (found.key, found.fate) == (key, fate)
    assert (unreferenced([key], needed, dropped, 5) == [key]) == (fate in ("leftover", "young", "undated"))
