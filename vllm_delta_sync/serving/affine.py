"""Boxes of memory and the affine map from checkpoint elements to live elements.

Does not import torch or vLLM, and never looks at an element: only at sizes, strides and offsets, counted in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from vllm_delta_sync.errors import UnsupportedLayout

_MOST_RUNS = 1 << 26  # 512 MiB of start positions: beyond it a layout is refused rather than enumerated


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a flat buffer, as torch describes it: any dims, also of size 1 or stride 0.

    Args:
        offset: position of the first element in the buffer.
        sizes, strides: one entry a dim, outermost first.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A set of distinct positions in canonical form: dims by falling stride, nested, none of size 1, none mergeable.

    Nested means stride[k] >= stride[k+1] * size[k+1], so a position names at most one element and is inverted greedily.
    Two boxes of the same positions, taken in ascending order, compare equal.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of positions."""
        return prod(self.sizes)

    @property
    def end(self) -> int:
        """One more than the last position."""
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))

    def rank(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the box's positions are below each of the given ones, int64 of their shape."""
        rest = np.maximum(positions - self.offset, 0)
        below, inner = np.zeros_like(rest), self.numel
        for size, stride in zip(self.sizes, self.strides, strict=True):
            inner //= size
            index = np.minimum(rest // stride, size)
            below += index * inner
            rest = np.where(index < size, rest - index * stride, 0)
        return below + (rest > 0)

    def positions(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions below which there are so many of the box, each of `ranks` below `numel`."""
        found, inner = np.full_like(ranks, self.offset), self.numel
        for size, stride in zip(self.sizes, self.strides, strict=True):
            inner //= size
            found += ranks // inner % size * stride
        return found

    @classmethod
    def of(cls, view: View) -> Box:
        """The canonical box of a non-empty view; raises UnsupportedLayout when positions repeat or are not nested."""
        dims = sorted(
            ((s, n) for n, s in zip(view.sizes, view.strides, strict=True) if n != 1), key=lambda d: d[0], reverse=True
        )
        merged: list[tuple[int, int]] = []
        for stride, size in dims:
            if merged and merged[-1][0] == stride * size:
                merged[-1] = (stride, merged[-1][1] * size)
            else:
                merged.append((stride, size))
        _require_nested(merged, view)
        return cls(view.offset, tuple(n for _, n in merged), tuple(s for s, _ in merged))


@dataclass(frozen=True, slots=True)
class Region:
    """One box of a checkpoint tensor and where its elements live on this rank; a canonical form, so `==` works.

    Element i = (i0, i1, …) of the region is at source_offset + Σ i[k]·source_strides[k] of the flat, row-major
    checkpoint tensor and at target_offset + Σ i[k]·target_strides[k] of the live storage. Dims fall in source stride
    and are nested.
    """

    tensor: str  # checkpoint name
    sizes: tuple[int, ...]
    source_offset: int  # elements of the checkpoint tensor
    source_strides: tuple[int, ...]
    storage: int  # index into the layout's storages
    target_offset: int  # elements of the storage
    target_strides: tuple[int, ...]
    target_dtype: str  # safetensors name of the live elements' type

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def source(self) -> Box:
        """The positions in the checkpoint tensor, merged without regard to the target: equal sets compare equal."""
        return Box.of(View(self.source_offset, self.sizes, self.source_strides))

    @property
    def target(self) -> Box:
        """The positions in the live storage."""
        return Box.of(View(self.target_offset, self.sizes, self.target_strides))

    def rows(self, first: int, count: int) -> Region:
        """`count` rows, or what there is of them, from row `first` of the outermost dim on."""
        return replace(
            self,
            sizes=(min(count, self.sizes[0] - first), *self.sizes[1:]),
            source_offset=self.source_offset + first * self.source_strides[0],
            target_offset=self.target_offset + first * self.target_strides[0],
        )

    @property
    def first_row(self) -> Region:
        """The first row of the outermost dim, without that dim."""
        return replace(
            self,
            sizes=self.sizes[1:],
            source_strides=self.source_strides[1:],
            target_strides=self.target_strides[1:],
        )


def compose(tensor: str, source: View, target: View, storage: int, target_dtype: str) -> Region:
    """The region of a recorded `target.copy_(source)`; both views are non-empty, the source is broadcast as torch does.

    Raises:
        UnsupportedLayout: one element is copied to many places, a place is written twice, or a view is not nested.
    """
    strides = _broadcast(source, target.sizes)
    paired = sorted(
        ((s, n, t) for n, s, t in zip(target.sizes, strides, target.strides, strict=True) if n != 1),
        key=lambda dim: dim[0],
        reverse=True,
    )
    dims: list[tuple[int, int, int]] = []
    for s, n, t in paired:
        if dims and dims[-1][0] == s * n and dims[-1][2] == t * n:
            dims[-1] = (s, dims[-1][1] * n, t)
        else:
            dims.append((s, n, t))
    region = Region(
        tensor,
        tuple(n for _, n, _ in dims),
        source.offset,
        tuple(s for s, _, _ in dims),
        storage,
        target.offset,
        tuple(t for _, _, t in dims),
        target_dtype,
    )
    for side, steps in (("read", region.source_strides), ("written", region.target_strides)):
        try:
            Box.of(View(0, region.sizes, steps))
        except UnsupportedLayout as error:
            raise UnsupportedLayout(f"the elements {side} by the loader are not a plain view: {error}") from None
    return region


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share a position, or None when all are disjoint.

    Works on the structure where it can (boxes far apart, boxes side by side in the same rows) and enumerates only what
    is left, so a model's worth of boxes takes milliseconds. Raises UnsupportedLayout when that rest is too scattered.
    """
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].offset)
    cluster: list[int] = []
    end = 0
    for index in [*order, -1]:
        if index >= 0 and cluster and boxes[index].offset < end:
            cluster.append(index)
            end = max(end, boxes[index].end)
            continue
        if len(cluster) > 1:
            base = boxes[cluster[0]].offset
            found = _overlap_in_cluster(
                tuple(Box(boxes[i].offset - base, boxes[i].sizes, boxes[i].strides) for i in cluster)
            )
            if found is not None:
                return cluster[found[0]], cluster[found[1]]
        if index >= 0:
            cluster, end = [index], boxes[index].end
    return None


@lru_cache(maxsize=4096)
def _overlap_in_cluster(boxes: tuple[Box, ...]) -> tuple[int, int] | None:
    """`first_overlap` of boxes that interleave, the first at 0. Layers and experts repeat, hence the cache."""
    outer = {(box.sizes[0], box.strides[0]) if box.sizes else None for box in boxes}
    if len(outer) == 1 and None not in outer:
        rows = [Box(box.offset, box.sizes[1:], box.strides[1:]) for box in boxes]
        if max(row.end for row in rows) <= boxes[0].strides[0]:
            return first_overlap(rows)
    return _overlap_in_runs(boxes)


def _overlap_in_runs(boxes: tuple[Box, ...]) -> tuple[int, int] | None:
    pieces = [runs(box) for box in boxes]
    if sum(len(starts) for starts, _ in pieces) > _MOST_RUNS:
        raise UnsupportedLayout(f"{len(boxes)} interleaved views fall into more than {_MOST_RUNS} runs")
    starts = np.concatenate([s for s, _ in pieces])
    lengths = np.repeat([length for _, length in pieces], [len(s) for s, _ in pieces])
    owners = np.repeat(np.arange(len(boxes)), [len(s) for s, _ in pieces])
    order = np.argsort(starts, kind="stable")
    clash = np.flatnonzero((starts + lengths)[order][:-1] > starts[order][1:])
    if not len(clash):
        return None
    return int(owners[order[clash[0]]]), int(owners[order[clash[0] + 1]])


def runs(box: Box) -> tuple[NDArray[np.int64], int]:
    """The positions of a box as (start of each run int64[n], ascending; length of every run)."""
    dims = list(zip(box.sizes, box.strides, strict=True))
    length = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    if prod(n for n, _ in dims) > _MOST_RUNS:
        raise UnsupportedLayout(f"a view of {box.numel} elements falls into more than {_MOST_RUNS} runs")
    starts = np.array([box.offset], np.int64)
    for size, stride in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _broadcast(source: View, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the source over the target's dims."""
    missing = len(sizes) - len(source.sizes)
    if missing < 0:
        raise UnsupportedLayout(f"shape {source.sizes} cannot be copied into shape {sizes}")
    strides = (0,) * missing + source.strides
    for have, want, stride in zip((1,) * missing + source.sizes, sizes, strides, strict=True):
        if have != want and have != 1:
            raise UnsupportedLayout(f"shape {source.sizes} cannot be copied into shape {sizes}")
        if want != 1 and (have == 1 or stride == 0):
            raise UnsupportedLayout(
                f"the loader copies one checkpoint element to {want} places (shape {source.sizes} into {sizes})"
            )
    return strides


def _require_nested(dims: list[tuple[int, int]], view: View) -> None:
    below = 1
    for stride, size in reversed(dims):
        if stride < below:
            raise UnsupportedLayout(f"sizes {view.sizes} with strides {view.strides} repeat or interleave positions")
        below = stride * size
