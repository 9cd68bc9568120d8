"""Adds the ranks' hash lanes up to the tensors' and compares every copy with its canonical region.

Pure: no I/O, no torch, no vLLM. Lanes are uint32 [n, 4], added modulo 2**32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_delta_sync.errors import StateHashMismatch, UnmappedTensor, UnsupportedLayout
from vllm_delta_sync.serving.coverage import Coverage, cover
from vllm_delta_sync.serving.messages import Lanes, Staged
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire.tensors import TensorSpec


class Proof:
    """The sums over ranks that prove weights, or an update's effect on them.

    Args:
        coverage: which region of which rank is canonical for which elements, and which are copies of it.
        regions: number of regions per rank.
        tensors: names in the order of version 0's table.
    """

    def __init__(self, coverage: Coverage, regions: Sequence[int], tensors: Sequence[str]) -> None:
        self._tensors = tuple(tensors)
        self._first_row = np.concatenate(([0], np.cumsum(regions))).astype(np.int64)
        index = {name: i for i, name in enumerate(self._tensors)}
        canonical, of_tensor, copies, of_canonical = [], [], [], []
        for group in coverage.groups:
            rows = [int(self._first_row[rank]) + region for rank, region in group.members]
            canonical.append(rows[0])
            of_tensor.append(index[group.tensor])
            copies += rows[1:]
            of_canonical += rows[:1] * (len(rows) - 1)
        self._canonical = np.array(canonical, dtype=np.int64)
        self._of_tensor = np.array(of_tensor, dtype=np.int64)
        self._copies = np.array(copies, dtype=np.int64)
        self._of_canonical = np.array(of_canonical, dtype=np.int64)
        self._tensor_of_row = dict(zip(canonical, of_tensor, strict=True))
        self.unmapped = coverage.unmapped
        self.skipped = tuple(sorted(index[name] for name in coverage.unmapped))

    @classmethod
    def of_layouts(cls, layouts: Sequence[RankLayout], specs: Sequence[TensorSpec], *, ignore_unmapped: bool) -> Proof:
        """The sums for what the ranks' traces found, one layout per rank.

        Raises:
            UnsupportedLayout: a tensor cannot be patched in place, or only part of it is held anywhere.
            UnmappedTensor: a tensor is held nowhere, and `ignore_unmapped` does not allow that.
        """
        unsupported = [f"{name}: {why}" for layout in layouts for name, why in layout.unsupported]
        if unsupported:
            raise UnsupportedLayout(f"{len(unsupported)} tensors cannot be patched in place, first: {unsupported[0]}")
        coverage = cover([layout.regions for layout in layouts], specs)
        if coverage.unmapped and not ignore_unmapped:
            raise UnmappedTensor(
                f"the serving model loads {len(coverage.unmapped)} published tensors on no rank: "
                f"{some(coverage.unmapped)}; set `unmapped: ignore` to serve without them"
            )
        return cls(coverage, [len(layout.regions) for layout in layouts], [spec.name for spec in specs])

    def dense(self, rank: int, regions: Sequence[int], lanes: Lanes) -> Lanes:
        """Lanes of some regions of a rank, spread to uint32 [all its regions, 4]; zero elsewhere."""
        full = np.zeros((int(self._first_row[rank + 1] - self._first_row[rank]), 4), dtype=np.uint32)
        full[list(regions)] = lanes
        return full

    def sum(self, by_rank: Mapping[int, Lanes]) -> Lanes:
        """Lanes of every tensor, uint32 [tensors, 4].

        Raises:
            StateHashMismatch: a copy differs from the region it copies.
        """
        rows = np.concatenate([by_rank[rank] for rank in range(len(self._first_row) - 1)])
        differ = (rows[self._copies] != rows[self._of_canonical]).any(axis=1)
        if differ.any():
            first = int(np.flatnonzero(differ)[0])
            tensor = self._tensors[self._tensor_of_row[int(self._of_canonical[first])]]
            rank = int(np.searchsorted(self._first_row, self._copies[first], side="right")) - 1
            raise StateHashMismatch(
                f"{int(differ.sum())} copies of weights differ from the originals, first: {tensor!r} on rank {rank}; "
                "something other than this update writes to the weights, or they are stored in another "
                "order than they are loaded"
            )
        total = np.zeros((len(self._tensors), 4), dtype=np.uint32)
        np.add.at(total, self._of_tensor, rows[self._canonical])
        return total

    def check_staged(self, staged: Sequence[Staged]) -> None:
        """An update's effect on live memory, as the ranks in their order have staged it, must be what the log promises.

        Raises:
            StateHashMismatch: naming the first tensor that would come out wrong.
        """
        by_rank = {rank: self.dense(rank, reply.regions, reply.lanes) for rank, reply in enumerate(staged)}
        expected = np.zeros((len(self._tensors), 4), dtype=np.uint32)
        expected[list(staged[0].tensors)] = staged[0].effects
        expected[list(self.skipped)] = 0
        wrong = (self.sum(by_rank) != expected).any(axis=1)
        if wrong.any():
            first = self._tensors[int(np.flatnonzero(wrong)[0])]
            raise StateHashMismatch(
                f"{int(wrong.sum())} tensors would not come to the published state hash, first: {first!r}; "
                "nothing was written: either the live weights are not those of the version before, or "
                "part of the update reaches no live weight"
            )


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
