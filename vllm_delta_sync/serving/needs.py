"""What a rank's regions hold, as element ranges of checkpoint tensors.

Does not look at any table or block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.serving.affine import Box, Region
from vllm_delta_sync.wire.tensors import TensorSpec

_SMALLEST_HOLE = 1 << 18  # elements; between smaller ones hardly a block fits
_MOST_RANGES = 4096  # of one region


def needs_of(regions: Iterable[Region], specs: Iterable[TensorSpec]) -> Needs:
    """All that the regions hold, and what lies between where they are interleaved with others (a split of dim 1).

    Args:
        regions: of one rank.
        specs: every tensor of the model.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for region in regions:
        found[region.tensor] += _ranges(region.source)
    return Needs({name: tuple(ranges) for name, ranges in found.items()}, sum(spec.numel for spec in specs))


def _ranges(box: Box, most: int = _MOST_RANGES) -> Iterator[tuple[int, int]]:
    """Ranges that cover a box, without the large holes between its outer rows."""
    if not box.sizes:
        yield box.offset, box.end
        return
    size, stride = box.sizes[0], box.strides[0]
    row = Box(box.offset, box.sizes[1:], box.strides[1:])
    if stride - (row.end - row.offset) < _SMALLEST_HOLE or size > most:
        yield box.offset, box.end
        return
    for index in range(size):
        yield from _ranges(Box(box.offset + index * stride, row.sizes, row.strides), most // size)
