"""How the `ctx` codec sees the bits of each dtype: as patterns, which it classes and orders as a float's.

Does not code. docs/protocol.md, *ctx*, is normative.
"""

from __future__ import annotations

import numpy as np

from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire.dtypes import Dtype


def pattern(dtype: Dtype, bits: Bits) -> Bits:
    """Bits uW[n] of a dtype as patterns uW[n]: those of a float themselves, an integer's as a float of its order.

    A pattern's pattern is the bits that it was made from.
    """
    return _ordered(bits) if dtype.integer else bits


def _ordered(bits: Bits) -> Bits:
    """A float's place among the values of its width, mod 2^(8 W): monotone, one to one, its own inverse."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, sign - bits.dtype.type(1) - bits, bits)
