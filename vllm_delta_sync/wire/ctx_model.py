"""The statistics that the `ctx` codec codes with: classes of contexts, and the frequencies of gaps and steps in each.

Does not code anything, and does not read blocks: it is given counts.
"""

from __future__ import annotations

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
        steps: those of them that change, by context and step symbol, [256, 249].
        toll: bits that one class more costs.
    """
    last = np.flatnonzero(members)
    last = np.append(last[:-1], CONTEXTS - 1)
    first = np.append(0, last[:-1] + 1)
    inside = np.add.reduceat(members, first).astype(np.float64)  # members of each group
    changes = np.add.reduceat(steps[:, steps.any(axis=0)], first, axis=0).astype(np.float64)
    while last.size > 1:
        costs = _bits(inside, changes)
        gains = _bits(inside[:-1] + inside[1:], changes[:-1] + changes[1:]) - costs[:-1] - costs[1:]
        at = int(np.argmin(gains))
        if last.size <= MAX_MADE and gains[at] >= toll:
            break
        inside[at + 1] += inside[at]
        changes[at + 1] += changes[at]
        last, inside, changes = np.delete(last, at), np.delete(inside, at), np.delete(changes, at, axis=0)
    return last.astype(np.uint8)


def _bits(members: Counts, steps: Counts) -> Counts:
    """What it takes at least to tell which of members [G] change, and by what of steps [G, S]; [G]."""
    changed = steps.sum(axis=1)
    bits: Counts = (_nats(members) - _nats(members - changed) - _nats(steps).sum(axis=1)) / np.log(2)
    return bits


def _nats(n: Counts) -> Counts:
    nats: Counts = n * np.log(np.maximum(n, 1.0))
    return nats


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
