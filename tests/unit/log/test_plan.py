"""The plan is the cheapest way there is, by bytes and then by edges, and a missing one is named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.log.plan import HOP_BYTES, Edge, admissible, plan, quickest, ranges

versions = st.integers(0, 6)
edges = st.builds(Edge, st.none() | versions, versions, st.integers(0, 5))
graphs = st.lists(edges, max_size=12)


def cheapest(graph: list[Edge], held: int | None, goal: int, hop_bytes: int = 0) -> tuple[int, int] | None:
    """The cost (bytes and so many for each edge, edges) of the best way, by trying all that visit no version twice."""
    found: list[tuple[int, int]] = [(0, 0)] if held == goal else []

    def go(version: int | None, seen: frozenset[int], cost: int, steps: int) -> None:
        for edge in graph:
            if edge.source in (None, version) and edge.to not in seen:
                if edge.to == goal:
                    found.append((cost + edge.bytes + hop_bytes, steps + 1))
                else:
                    go(edge.to, seen | {edge.to}, cost + edge.bytes + hop_bytes, steps + 1)

    go(held, frozenset() if held is None else frozenset({held}), 0, 0)
    return min(found, default=None)


@settings(max_examples=50, deadline=None)
@given(graphs, st.none() | versions, versions, st.integers(0, 3))
def test_the_plan_is_as_cheap_as_the_best_of_all_ways(
    graph: list[Edge], held: int | None, goal: int, hop_bytes: int
) -> None:
    best = cheapest(graph, held, goal, hop_bytes)
    if best is None:
        with pytest.raises(VersionGap):
            plan(graph, held, goal, hop_bytes)
        return
    way = plan(graph, held, goal, hop_bytes)
    assert (sum(edge.bytes + hop_bytes for edge in way), len(way)) == best
    assert all(edge in graph for edge in way)
    assert all(after.source in (None, before.to) for before, after in pairwise(way))
    if way:
        assert way[0].source in (None, held)
        assert way[-1].to == goal


DELTAS = [Edge(n - 1, n, 10) for n in range(1, 9)]


@pytest.mark.parametrize(
    ("extra", "held", "goal", "way"),
    [
        ([], 3, 3, []),
        ([], 2, 4, [(2, 3), (3, 4)]),
        ([Edge(0, 8, 80)], 0, 8, [(0, 8)]),  # the same bytes in fewer steps
        ([Edge(0, 8, 81)], 0, 8, [(n - 1, n) for n in range(1, 9)]),
        ([Edge(2, 6, 25), Edge(6, 8, 15)], 1, 8, [(1, 2), (2, 6), (6, 8)]),
        ([Edge(None, 7, 30)], 0, 8, [(None, 7), (7, 8)]),
        ([Edge(None, 7, 30)], 5, 8, [(5, 6), (6, 7), (7, 8)]),  # 30 bytes, not 40
        ([Edge(None, 4, 99)], None, 5, [(None, 4), (4, 5)]),
        ([Edge(8, 3, 40)], 8, 3, [(8, 3)]),
        ([Edge(8, 3, 40)], 8, 5, [(8, 3), (3, 4), (4, 5)]),
    ],
)
def test_plans(extra: list[Edge], held: int | None, goal: int, way: list[tuple[int | None, int]]) -> None:
    assert [(edge.source, edge.to) for edge in plan([*DELTAS, *extra], held, goal)] == way


@settings(max_examples=50, deadline=None)
@given(st.lists(st.builds(Edge, st.none() | versions, versions, st.integers(0, 100)), max_size=20), versions, versions)
def test_the_quickest_way_takes_no_more_hops_and_at_most_a_quarter_more_bytes(
    graph: list[Edge], held: int, goal: int
) -> None:
    try:
        fewest = plan(graph, held, goal)
    except VersionGap:
        with pytest.raises(VersionGap):
            quickest(graph, held, goal)
        return
    way = quickest(graph, held, goal)
    assert len(way) <= len(fewest)
    assert sum(edge.bytes for edge in way) <= sum(edge.bytes for edge in fewest) * 1.25


LARGE = 10 * HOP_BYTES


@pytest.mark.parametrize(
    ("size", "fold", "taken"),
    [
        pytest.param(100, 225, True, id="a quarter of a delta is worth a hop"),
        pytest.param(100, 226, False, id="no more than that where there is little to fetch"),
        pytest.param(LARGE, 2 * LARGE + HOP_BYTES, True, id="where there is much, a fixed number of bytes"),
        pytest.param(LARGE, 2 * LARGE + HOP_BYTES + 1, False, id="and no more"),
    ],
)
def test_a_hop_less_is_worth_some_bytes(size: int, fold: int, taken: bool) -> None:
    way = quickest([Edge(0, 1, size), Edge(1, 2, size), Edge(0, 2, fold)], 0, 2)
    assert (way == [Edge(0, 2, fold)]) is taken


@pytest.mark.parametrize(
    ("graph", "held", "goal", "message"),
    [
        (
            [Edge(n - 1, n, 1) for n in (1, 2, 3, 6, 7)],
            1,
            7,
            "no way from version 1 to version 7 over deltas, folds and anchors: from there only 1–3 can be reached, "
            "and it can be reached only from 5–6",
        ),
        (
            [Edge(None, 2, 1)],
            9,
            5,
            "no way from version 9 to version 5 over deltas, folds and anchors: from there only 2, 9 can be reached, "
            "and nothing leads to it",
        ),
        (
            [],
            None,
            4,
            "no way from nothing to version 4 over deltas, folds and anchors: nothing leads on from there, "
            "and nothing leads to it",
        ),
    ],
)
def test_what_is_missing_is_named(graph: list[Edge], held: int | None, goal: int, message: str) -> None:
    with pytest.raises(VersionGap) as caught:
        plan(graph, held, goal)
    assert str(caught.value) == message


@settings(max_examples=50, deadline=None)
@given(graphs, versions, versions)
def test_admissible_ways_pass_through_nothing_beyond_their_ends(graph: list[Edge], held: int, goal: int) -> None:
    try:
        way = plan(admissible(graph, held, goal), held, goal)
    except VersionGap:
        return
    assert all(min(held, goal) <= edge.to <= max(held, goal) for edge in way)


def test_ranges_are_short() -> None:
    assert ranges([3, 1, 2, 7]) == "1–3, 7"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, …"
    assert ranges([]) == ""
