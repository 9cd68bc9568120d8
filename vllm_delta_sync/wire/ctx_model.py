"""The statistics that the `ctx` codec codes with: classes of contexts, and the frequencies of gaps and steps in each.

Does not code anything, and does not read blocks: it is given counts.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.native.ctx_types import CONTEXTS, TOTAL

Counts = npt.NDArray[Any]

MAX_MADE = 7  # classes: each takes time for every element, and those of the format's 16 beyond it save 1 % of the bytes


def classes(members: Counts, steps: Counts, toll: float) -> npt.NDArray[np.uint8]:
    """Merge neighbouring contexts while that costs less than a class does; the last context of each class, u8[C].

    Args:
        members: elements by the context of their old value, [256].
        steps: changes by context and step symbol, [256, 249].
        toll: bits that one class more costs.
    """
    last = [c for c in range(CONTEXTS) if members[c] > 0] or [0]
    last[-1] = CONTEXTS - 1
    first = [0, *(c + 1 for c in last[:-1])]
    groups = [
        (float(members[a : b + 1].sum()), steps[a : b + 1].sum(axis=0).astype(np.float64))
        for a, b in zip(first, last, strict=True)
    ]
    costs = [_bits(*group) for group in groups]
    merged = [_joined(a, b) for a, b in itertools.pairwise(groups)]
    gains = [_bits(*both) - costs[i] - costs[i + 1] for i, both in enumerate(merged)]
    while gains:
        at = int(np.argmin(gains))
        if len(groups) <= MAX_MADE and gains[at] >= toll:
            break
        groups[at : at + 2] = [merged[at]]
        costs[at : at + 2] = [_bits(*merged[at])]
        del last[at], merged[at], gains[at]
        for i in (at - 1, at):
            if 0 <= i < len(merged):
                merged[i] = _joined(groups[i], groups[i + 1])
                gains[i] = _bits(*merged[i]) - costs[i] - costs[i + 1]
    return np.array(last, np.uint8)


def _joined(a: tuple[float, Counts], b: tuple[float, Counts]) -> tuple[float, Counts]:
    return a[0] + b[0], a[1] + b[1]


def _bits(members: float, steps: Counts) -> float:
    """What it takes at least to tell which of so many members change, and by what."""
    changed = float(steps.sum())
    members = max(members, changed)
    still = members - changed
    where = _nats(members) - _nats(changed) - _nats(still)
    some = steps[steps > 0]
    what = _nats(changed) - float((some * np.log(some)).sum())
    return (where + what) / float(np.log(2))


def _nats(n: float) -> float:
    return n * float(np.log(n)) if n > 0 else 0.0


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
