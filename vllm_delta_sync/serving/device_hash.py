"""The state hash of a region by a device's kernel, which knows contiguous runs of a tensor only.

Does not bring live elements to the host. A region with holes is hashed among zeros, which add nothing to a hash.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vllm_delta_sync.kernels import Backend
from vllm_delta_sync.native import Seed
from vllm_delta_sync.native.types import U32
from vllm_delta_sync.serving.affine import Region

SPAN = 1 << 24  # elements of a tensor that are put among zeros at a time


def hash_region(flat: torch.Tensor, region: Region, seed: Seed, backend: Backend) -> U32:
    """Lanes uint32 [4] of a region of `flat`: a whole storage, as integers of the published width.

    Args:
        backend: of its device.
    """
    lanes = np.zeros(4, np.uint32)
    if region.source_strides in ((), (1,)) and region.target_strides == region.source_strides:
        return lanes + backend.hash(_view(flat, region).reshape(-1), region.source_offset, seed)
    for part in parts(region, SPAN):
        dense = flat.new_zeros(_span(part))
        dense.as_strided(part.sizes, part.source_strides).copy_(_view(flat, part))
        lanes += backend.hash(dense, part.source_offset, seed)
    return lanes


def parts(region: Region, most: int) -> Iterator[Region]:
    """The region cut along its outer dims into parts that each reach over at most `most` elements of the tensor."""
    if not region.sizes or _span(region) <= most:
        yield region
        return
    rows = max(1, most // region.source_strides[0])
    for first in range(0, region.sizes[0], rows):
        part = region.rows(first, rows)
        if rows > 1:
            yield part
        else:
            yield from parts(part.first_row, most)


def _span(region: Region) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(region.sizes, region.source_strides, strict=True))


def _view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    return flat.as_strided(region.sizes, region.target_strides, region.target_offset)
