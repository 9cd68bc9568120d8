"""The statistics that the `ctx` codec codes with: classes of contexts, and the frequencies of gaps and steps in each.

Does not code anything, and does not read blocks: it is given counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    # Neighbouring contexts up to each end: how many elements have one of them, and steps of those that change.
    inside = [*np.add.reduceat(members, first).astype(np.float64)]
    changes = [*np.add.reduceat(steps[:, steps.any(axis=0)], first, axis=0).astype(np.float64)]
    own = _nats(inside, changes)
    joined = _joined(inside, changes)
    toll *= math.log(2)
    while joined:
        costs = [both - left - right for both, (left, right) in zip(joined, pairwise(own), strict=True)]
        least = min(costs)
        if len(ends) <= MAX_MADE and least >= toll:
            break
        at = costs.index(least)
        del ends[at]
        inside[at : at + 2] = [inside[at] + inside[at + 1]]
        changes[at : at + 2] = [changes[at] + changes[at + 1]]
        own[at : at + 2] = [joined[at]]
        around = slice(max(0, at - 1), at + 2)
        joined[max(0, at - 1) : at + 2] = _joined(inside[around], changes[around])
    return np.array(ends, np.uint8)


def _joined(inside: Sequence[float], changes: Sequence[Counts]) -> list[float]:
    """The same of each two neighbours as one."""
    return _nats([a + b for a, b in pairwise(inside)], [a + b for a, b in pairwise(changes)])


def _nats(members: Sequence[float], steps: Sequence[Counts]) -> list[float]:
    """What it takes at least to tell which members change, and by what: of groups with steps [S] each."""
    if not members:
        return []
    all_of, changed = np.array(members), np.array(steps)
    found: list[float] = (
        _entropy(all_of) - _entropy(all_of - changed.sum(axis=1)) - _entropy(changed).sum(axis=1)
    ).tolist()
    return found


def _entropy(counts: Counts) -> Counts:
    found: Counts = counts * np.log(np.maximum(counts, 1))
    return found


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
