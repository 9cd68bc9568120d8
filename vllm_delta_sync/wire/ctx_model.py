"""The statistics that the `ctx` codec codes with: classes of contexts, and the frequencies of gaps and steps in each.

Does not code anything, and does not read blocks: it is given counts.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.native.ctx_types import CONTEXTS, TOTAL

Counts = npt.NDArray[Any]

CLASS_BITS, END_BITS = 500.0, 5.0  # what a class costs, about: once for its frequencies, and its end in every tile
MAX_MADE = 6  # classes: each takes time for every element, and those of the format's 16 beyond it save 1 % of the bytes


def classes(members: Counts, steps: Counts, toll: float) -> npt.NDArray[np.uint8]:
    """Merge neighbouring contexts while that costs less than a class does; the last context of each class, u8[C].

    Args:
        members: elements by the context of their old value, [256].
        steps: those of them that change, by context and step symbol, [256, 249].
        toll: bits that one class more costs.
    """
    ends = [*np.flatnonzero(members)[:-1].tolist(), CONTEXTS - 1]
    first = [0, *(end + 1 for end in ends[:-1])]
    groups = [
        _Group(end, float(inside), changes)
        for end, inside, changes in zip(
            ends,
            np.add.reduceat(members, first),
            np.add.reduceat(steps[:, steps.any(axis=0)], first, axis=0).astype(np.float64),
            strict=True,
        )
    ]
    joined = [left.joined(right) for left, right in pairwise(groups)]
    toll *= math.log(2)
    while joined:
        costs = [
            both.nats - left.nats - right.nats for both, (left, right) in zip(joined, pairwise(groups), strict=True)
        ]
        at = min(range(len(costs)), key=costs.__getitem__)
        if len(groups) <= MAX_MADE and costs[at] >= toll:
            break
        groups[at : at + 2] = [joined.pop(at)]
        for pair in range(max(0, at - 1), min(at + 1, len(joined))):
            joined[pair] = groups[pair].joined(groups[pair + 1])
    return np.array([group.last for group in groups], np.uint8)


class _Group:
    """Neighbouring contexts up to `last`: how many elements have one of them, and steps [S] of those that change."""

    def __init__(self, last: int, members: float, steps: Counts) -> None:
        self.last, self._members, self._steps = last, members, steps
        unchanged = members - float(steps.sum())
        found = steps[steps > 0]
        # What it takes at least to tell which of the members change, and by what.
        self.nats = _nats(members) - _nats(unchanged) - float((found * np.log(found)).sum())

    def joined(self, later: _Group) -> _Group:
        """With the contexts that follow."""
        return _Group(later.last, self._members + later._members, self._steps + later._steps)


def _nats(n: float) -> float:
    return n * math.log(n) if n > 1 else 0.0


def frequencies(counts: Counts, *needed: int) -> npt.NDArray[np.uint16]:
    """12-bit frequencies u16[C, S] in proportion to counts [C, S]: at least 1 of what was seen and of what is needed.

    Args:
        needed: symbols that an encoder may not do without, whatever was seen.
    """
    seen = counts.astype(np.float64)
    seen[:, needed] = np.maximum(seen[:, needed], 1e-9)
    found = np.where(seen > 0, np.maximum(1, np.rint(seen * (TOTAL / seen.sum(axis=1, keepdims=True)))), 0)
    for row in found:
        while (missing := TOTAL - int(row.sum())) != 0:
            largest = int(np.argmax(row))
            row[largest] += missing if missing > 0 else -min(-missing, max(1, int(row[largest]) // 8))
    return found.astype(np.uint16)
