"""What a block's lengths may be, for each codec of the closed registry, as vectorised rules.

Does not decode. A reader checks these before it allocates anything for a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

DENSE, GAP, GAP_ABS, CTX, BITMAP, BITMAP_ABS = 0, 1, 2, 3, 4, 5
NAMES = {DENSE: "dense", GAP: "gap", GAP_ABS: "gap-abs", CTX: "ctx", BITMAP: "bitmap", BITMAP_ABS: "bitmap-abs"}
MAX_MODELS = 64  # of a table, for `ctx`
MAX_HEAD = 1 << 14  # bytes of a ctx block's index stream: a few for each of at most 4096 tiles

# A fold of sparse blocks may come out sparse where a dense copy would be smaller, because whoever folds does not know
# the values that are not listed. Streams of a few elements exceed such a copy by their frames' headers.
SLACK_BYTES = 512

Column = npt.NDArray[Any]


def violations(
    codec: Column,
    count: Column,
    changed: Column,
    width: Column,
    half: Column,
    length: Column,
    raw: Column,
    model: Column,
    models: int,
) -> Iterator[tuple[npt.NDArray[np.bool_], str]]:
    """(rows that break a rule, the rule), one by one; columns int64 [B]; length, raw [B, 2]; `models`: how many."""
    dense, gap, gap_abs, ctx, bitmap, bitmap_abs = (codec == code for code in NAMES)
    steps, values = gap | bitmap, gap_abs | bitmap_abs
    index, value = raw[:, 0], raw[:, 1]
    size = count * width
    yield ~(dense | steps | values | ctx), f"its codec is not one of {', '.join(f'{c} {n}' for c, n in NAMES.items())}"
    yield steps & ~half, "codecs gap and bitmap are for BF16 and F16 only"
    yield ctx & (width > 4), "codec ctx is for elements of 1, 2 or 4 bytes"
    yield np.where(ctx, model >= models, model != 0), "it names a model that there is not"
    yield ctx & ((raw != length).any(axis=1) | (index > MAX_HEAD)), "its streams cannot be that long"
    yield dense & ((index != 0) | (length[:, 0] != 0)), "a dense block has no index stream"
    yield dense & ((value != size) | (length[:, 1] != size)), "a dense block holds its count of elements, raw"
    sparse, gaps = ~dense, gap | gap_abs
    # Each gap takes one byte and one more per 255 positions it skips, and all gaps together skip less than `count`.
    yield gaps & ((index < changed) | (index > changed + count // 255 + 1)), "its index stream cannot be that long"
    yield (bitmap | bitmap_abs) & (index != (count + 7) // 8), "its index has a bit for each element"
    yield steps & ((value < changed) | (value > 3 * changed)), "its steps take one or three bytes each"
    yield values & (value != changed * width), "its values take one element's bytes each"
    yield sparse & (length < 1).any(axis=1), "it lacks a stream"
    yield sparse & (length.sum(axis=1) > size + SLACK_BYTES), "it is larger than its dense copy"
