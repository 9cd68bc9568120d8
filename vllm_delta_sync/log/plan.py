"""The cheapest or quickest way from one version to another over deltas, folds and anchors, as pure functions.

Does not fetch anything and does not know what an edge is made of: `route` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vllm_delta_sync.errors import VersionGap

HOP_BYTES = 8 << 20
"""Bytes that one hop less is worth, at most: what comes from a bucket, at 100 MB/s, while a hop waits for its manifest
and then for its shard, some 40 ms each."""
DEARER = 4  # by no more than one part in so many of the fewest bytes does a way with fewer hops take more


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A step from version `source` (None: from anywhere, an anchor) to version `to` that costs `bytes` to fetch."""

    source: int | None
    to: int
    bytes: int


def quickest(edges: Collection[Edge], held: int | None, goal: int) -> list[Edge]:
    """As `plan`, but with fewer hops where they save more than their bytes take: so followers go.

    A hop is worth HOP_BYTES, and so much less where little is to be fetched that the way is at most 1 + 1/DEARER times
    as many bytes as the fewest.
    """
    fewest = plan(edges, held, goal)
    if len(fewest) < 2:
        return fewest
    bearable = sum(edge.bytes for edge in fewest) // (DEARER * len(fewest))
    return plan(edges, held, goal, min(HOP_BYTES, bearable))


def plan(edges: Iterable[Edge], held: int | None, goal: int, hop_bytes: int = 0) -> list[Edge]:
    """The edges from version `held` (None: from nothing, so an anchor comes first) to `goal`, fewest bytes in all.

    Of ways that cost the same, one with the fewest edges. Empty when `goal` is held. Raises VersionGap, naming what is
    missing, when no way leads there.

    Args:
        hop_bytes: bytes that each edge counts for besides its own.
    """
    if held == goal:
        return []
    leaving, anchors = _by_source(edges)
    best: dict[int | None, tuple[int, int]] = {held: (0, 0)}  # version → (cost, edges) from `held`
    came: dict[int, Edge] = {}
    parents: dict[int, int | None] = {}
    queue: list[tuple[int, int, int]] = []

    def expand(version: int | None, cost: int, steps: int, outgoing: Iterable[Edge]) -> None:
        for edge in outgoing:
            reached = (cost + edge.bytes + hop_bytes, steps + 1)
            if edge.to not in best or reached < best[edge.to]:
                best[edge.to] = reached
                came[edge.to], parents[edge.to] = edge, version
                heapq.heappush(queue, (*reached, edge.to))

    # From anywhere means from here: taken later, an anchor would only come on top of what was fetched before it.
    expand(held, 0, 0, [*anchors, *([] if held is None else leaving.get(held, []))])
    while queue:
        cost, steps, version = heapq.heappop(queue)
        if version == goal:
            return _walk_back(came, parents, held, goal)
        if (cost, steps) == best[version]:
            expand(version, cost, steps, leaving.get(version, []))
    reached_versions = {version for version in best if version is not None}
    raise VersionGap(_missing(leaving, held, goal, reached_versions))


def _by_source(edges: Iterable[Edge]) -> tuple[dict[int, list[Edge]], list[Edge]]:
    leaving: dict[int, list[Edge]] = {}
    anchors = []
    for edge in sorted(edges, key=lambda edge: (edge.to, edge.bytes)):
        if edge.source is None:
            anchors.append(edge)
        else:
            leaving.setdefault(edge.source, []).append(edge)
    return leaving, anchors


def _walk_back(came: dict[int, Edge], parents: dict[int, int | None], held: int | None, goal: int) -> list[Edge]:
    found = [came[goal]]
    while (previous := parents[found[-1].to]) != held:
        assert previous is not None, "only the first edge begins at nothing"
        found.append(came[previous])
    return found[::-1]


def _missing(leaving: dict[int, list[Edge]], held: int | None, goal: int, reached: set[int]) -> str:
    arriving: dict[int, set[int]] = {}
    for source, outgoing in leaving.items():
        for edge in outgoing:
            arriving.setdefault(edge.to, set()).add(source)
    leads, found = {goal}, [goal]
    while found:
        new = arriving.get(found.pop(), set()) - leads
        leads |= new
        found += new
    start = "from nothing" if held is None else f"from version {held}"
    here = f"from there only {ranges(reached)} can be reached" if reached - {held} else "nothing leads on from there"
    there = f"it can be reached only from {ranges(leads - {goal})}" if leads != {goal} else "nothing leads to it"
    return f"no way {start} to version {goal} over deltas, folds and anchors: {here}, and {there}"


def ranges(versions: Iterable[int], most: int = 6) -> str:
    """Versions for people: `0–4, 8, 16–32`, cut short after `most` runs."""
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    shown = [str(first) if first == last else f"{first}–{last}" for first, last in runs[:most]]
    return ", ".join(shown) + (", …" if len(runs) > most else "")


def admissible(edges: Iterable[Edge], held: int | None, goal: int) -> list[Edge]:
    """The edges that keep a served model between the version it has (None: none) and the one it goes to.

    A server that goes to a version does not pass through one beyond it, which a pin may be there to avoid, and does
    not go back before it goes forward.
    """
    low, high = (0, goal) if held is None else (min(held, goal), max(held, goal))
    return [edge for edge in edges if low <= edge.to <= high]
