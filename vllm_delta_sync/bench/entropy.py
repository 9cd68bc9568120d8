"""What an update must cost at least, in bytes per change: for a code that knows nothing, for one that knows the base.

Does not encode: these are entropies of the empirical distributions, in which the tables that a code needs cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.bench.step import Part
from vllm_delta_sync.native.types import Bits

Counts = npt.NDArray[np.int64]

# Where the exponent is in the bits of a float: (bits below it, its own bits). Other dtypes have one class.
_EXPONENTS = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F64": (52, 11), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}
_PIECE = 1 << 22  # elements classified at a time


@dataclass(frozen=True, slots=True)
class Entropy:
    """Bytes per changed element, for where it is and for what it becomes.

    With n elements of which c change, and their steps in the order of the dtype's values: the entropies of n draws of
    *changed or not* and of c draws of a step (Shannon 1948, §6: H = −Σ p·log₂ p with the observed shares as p), added.
    """

    iid: float  # all draws are of one distribution each
    conditional: float  # of one for each exponent of the old value, a step counted away from zero


def measure(parts: Iterable[Part]) -> Entropy:
    """The entropies of an update; every dtype has distributions of its own.

    Args:
        parts: all blocks of the model, changed or not; at least one element changed.
    """
    by_dtype: dict[str, list[Part]] = {}
    for part in parts:
        by_dtype.setdefault(part.spec.dtype, []).append(part)
    bits = [_of_dtype(dtype, found) for dtype, found in by_dtype.items()]
    changed = sum(count for count, _, _ in bits)
    iid, conditional = (sum(column) / changed / 8 for column in list(zip(*bits, strict=True))[1:])
    return Entropy(iid, conditional)


def _of_dtype(dtype: str, parts: list[Part]) -> tuple[int, float, float]:
    """How many elements changed, and the bits of all of them by either model."""
    elements = np.zeros(1, np.int64)
    olds, news = [], []
    for part in parts:
        histogram = _class_histogram(dtype, part.old)
        elements = histogram if elements.size == 1 else elements + histogram
        changes = part.diff()
        olds.append(changes.old)
        news.append(changes.new)
    old, new = np.concatenate(olds), np.concatenate(news)
    if not old.size:
        return 0, 0.0, 0.0
    classes = _classes(dtype, old)
    steps = ordered(dtype, new) - ordered(dtype, old)
    outward = np.where(_negative(dtype, old), -steps, steps)
    changed = np.bincount(classes, minlength=elements.size)
    iid = choice_bits(changed.sum(keepdims=True), elements.sum(keepdims=True)) + symbol_bits(_tally(steps))
    # H(step | class) = H(class, step) − H(class)
    joint = symbol_bits(_tally(outward, classes)) - symbol_bits(changed)
    return int(old.size), iid, choice_bits(changed, elements) + joint


def ordered(dtype: str, bits: Bits) -> Bits:
    """k(u) mod 2^w: the rank of bits in the order of the dtype's values, uW[n]; integers as they are."""
    if dtype not in _EXPONENTS:
        return bits
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits < top, bits, (top - 1) - bits)


def choice_bits(changed: Counts, elements: Counts) -> float:
    """Σ n·H(c/n) in bits: to say which c of n elements changed, by independent draws; i64[classes] each."""
    kept = elements - changed
    return float(_surprise(changed, elements) + _surprise(kept, elements))


def symbol_bits(counts: Counts) -> float:
    """c·H in bits of c symbols that were seen so often, i64[symbols]."""
    return _surprise(counts, np.full_like(counts, counts.sum()))


def _surprise(counts: Counts, totals: Counts) -> float:
    seen = counts > 0
    return float(np.sum(counts[seen] * np.log2(totals[seen] / counts[seen])))


def _tally(symbols: Bits, classes: npt.NDArray[Any] | None = None) -> Counts:
    """How often each symbol was seen (within each class), in no order."""
    if classes is None:
        return np.asarray(np.unique(symbols, return_counts=True)[1])
    index = np.unique(symbols, return_inverse=True)[1]  # fewer than 2³² of them, whatever the symbols' width
    pairs = classes.astype(np.uint64) << np.uint64(32) | index.astype(np.uint64)
    return np.asarray(np.unique(pairs, return_counts=True)[1])


def _class_histogram(dtype: str, bits: Bits) -> Counts:
    most = 1 << _EXPONENTS[dtype][1] if dtype in _EXPONENTS else 1
    found = np.zeros(most, np.int64)
    for at in range(0, bits.size, _PIECE):
        found += np.bincount(_classes(dtype, bits[at : at + _PIECE]), minlength=most)
    return found


def _classes(dtype: str, bits: Bits) -> npt.NDArray[np.int64]:
    if dtype not in _EXPONENTS:
        return np.zeros(bits.size, np.int64)
    below, own = _EXPONENTS[dtype]
    return np.asarray((bits >> bits.dtype.type(below)) & bits.dtype.type((1 << own) - 1), np.int64)


def _negative(dtype: str, bits: Bits) -> npt.NDArray[np.bool_]:
    if dtype not in _EXPONENTS:
        return np.zeros(bits.size, np.bool_)
    return np.asarray(bits >= bits.dtype.type(1 << (8 * bits.itemsize - 1)))
