"""Where the elements of a patch go, as the kernels want it told: by address, worked out while staging.

Looks at no live element; the addresses hold as long as nothing moves the targets, which whoever commits makes sure of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm_delta_sync.native.types import I64


def rows(targets: Sequence[Tensor], segments: I64) -> I64:
    """Rows (address of element 0, first, last, 0), as `native.scatter` takes them.

    Args:
        targets: flat tensors of one width.
        segments: [S, 4], rows (target, base, first, last) of the `scatter_` op.
    """
    found = np.zeros_like(segments)
    if len(segments):
        addresses = np.array([target.data_ptr() for target in targets], np.int64)
        found[:, 0] = addresses[segments[:, 0]] + segments[:, 1] * targets[0].element_size()
        found[:, 1:3] = segments[:, 2:4]
    return found


def runs(targets: Sequence[Tensor], segments: I64, most: int) -> I64:
    """The same cut into runs of at most `most` elements, one for each program: rows (address, first, last)."""
    whole = rows(targets, segments)
    first, last = whole[:, 1], whole[:, 2]
    pieces = -(-(last - first) // most)
    owner = np.repeat(np.arange(len(whole)), pieces)
    begin = first[owner] + (np.arange(owner.size) - (np.cumsum(pieces) - pieces)[owner]) * most
    return np.stack([whole[owner, 0], begin, np.minimum(begin + most, last[owner])], axis=1)
