"""How the `ctx` codec cuts a block into tiles, so that ranks which split a dimension decode theirs alone.

Pure arithmetic on shapes; does not touch elements. docs/protocol.md, *ctx*, is normative.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native import CtxGrid
from vllm_delta_sync.native.ctx_types import MAX_TILES, TILE_ELEMENTS

BANDS = 16  # into which a dimension is cut
PADDING = 64  # to a multiple of which vLLM pads a vocabulary before it splits it
VOCABULARY = 1 << 12  # from so many indices on, a dimension that is no multiple of that is one


@lru_cache(maxsize=1 << 12)
def band_of(size: int, inner: int) -> int:
    """Indices of a dimension of this size that make a band: where 2, 4, 8 or 16 ranks split it, bands end too.

    One that is neither a vocabulary nor sure to be split evenly is split anywhere: a single small tensor that a rank
    cannot decode would keep a whole version from it. What is larger than a tile is cut at some power of two, where that
    costs few tiles more: there end heads, and so the parts of fused projections and of other numbers of ranks.

    Args:
        inner: elements of one index.
    """
    if size % PADDING and size < VOCABULARY:
        return 1
    band, most = -(-size // PADDING) * PADDING // BANDS, TILE_ELEMENTS // inner
    if band <= most:
        return band
    divisors = [part for part in range(1, most + 1) if band % part == 0]
    power = max((part for part in divisors if part.bit_count() == 1), default=1)
    return power if 2 * power > most else max(divisors)


@lru_cache(maxsize=1 << 10)  # blocks are the same in every version; what a grid of most tiles takes, 1000 may
def grid(shape: tuple[int, ...], start: int, count: int, dim: int, band: int) -> CtxGrid:
    """The tiles of elements start … start+count−1 of a tensor cut into bands of `band` indices of dimension `dim`.

    Raises MalformedObject when there is no such dimension, the block is neither inside one of the rows that consist of
    this and the later dimensions nor made of whole ones, or there are too many tiles.
    """
    if not 0 <= dim < max(1, len(shape)) or band < 1:
        raise MalformedObject(f"bands of {band} indices of dimension {dim}, of a tensor {list(shape)}")
    length, width = math.prod(shape[dim:]), band * math.prod(shape[dim + 1 :])
    first = start % length
    if first + count <= length:
        rows = 1
    elif first == 0 and count % length == 0:
        rows = count // length
    else:
        raise MalformedObject(f"a block of {count} elements at {start} is not rows of {length}")
    columns = count // rows
    if columns > width * MAX_TILES:
        raise MalformedObject(f"a block of {count} elements in bands of {width} has more than {MAX_TILES} tiles")
    strips, at = [], first
    while at < first + columns:
        end = min(at + TILE_ELEMENTS, at - at % width + width, first + columns)
        strips.append((at - first, end - at))
        at = end
    cut = CtxGrid(rows, columns, np.array(strips, np.int64))
    if cut.tiles > MAX_TILES:
        raise MalformedObject(f"a block of {count} elements is cut into {cut.tiles} tiles, more than {MAX_TILES}")
    return cut
