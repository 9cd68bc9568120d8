"""The hash of each live region: proven by full passes over memory, kept running through commits, and audited.

Reads live memory, writes none. Does not know the log or what a version is made of.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from vllm_delta_sync import kernels
from vllm_delta_sync.errors import StateHashMismatch
from vllm_delta_sync.native import Seed
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.messages import Lanes
from vllm_delta_sync.wire.tensors import TensorSpec


@dataclass(frozen=True)
class _Proven:
    """Lanes that the live regions are proven to have, uint32 [regions, 4], at a version (None: at none)."""

    version: int | None
    lanes: Lanes


class RunningLanes:
    """What the regions of one rank hash to. One thread writes, within `writing`; any other may audit meanwhile.

    Args:
        regions: the rank's layout.
        specs: the tensors of the run, by name.
        seeds: of their hashes, by name.
        memory: what is hashed.
        backend: on a stream of which it is.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        specs: Mapping[str, TensorSpec],
        seeds: Mapping[str, Seed],
        memory: LiveMemory,
        backend: kernels.Backend,
    ) -> None:
        self._regions = regions
        self._specs = specs
        self._seeds = seeds
        self._memory = memory
        self._backend = backend
        self._proven: _Proven | None = None
        self._writes = 0  # odd while one is under way

    def prove(self) -> msg.Proved:
        """Full pass over all regions, while nothing is written."""
        begin = time.perf_counter()
        count = len(self._regions)
        lanes = np.array([self._hash(index) for index in range(count)], dtype=np.uint32).reshape(count, 4)
        self._proven = _Proven(None, lanes)
        return msg.Proved(lanes, time.perf_counter() - begin)

    def name(self, version: int | None) -> None:
        """What was proven is this version, or none."""
        assert self._proven is not None
        self._proven = _Proven(version, self._proven.lanes)

    @contextmanager
    def writing(self, regions: Sequence[int], effect: Lanes, version: int | None) -> Iterator[None]:
        """Live memory is written meanwhile, to become `version`; where that raises, it has stayed as it was.

        Args:
            regions: those that are written.
            effect: uint32 [len(regions), 4], what that adds to their lanes.
        """
        assert self._proven is not None
        touched = list(regions)
        lanes = self._proven.lanes.copy()
        lanes[touched] = lanes[touched] + effect
        self._writes += 1
        try:
            yield
            self._proven = _Proven(version, lanes)
        finally:
            self._writes += 1

    def audit(self, number: int) -> msg.Audited:
        """Full pass while steps and commits go on; what commits change meanwhile is accounted for, region by region."""
        assert self._proven is not None
        begin = time.perf_counter()
        passed = np.zeros_like(self._proven.lanes)
        wrong = set()
        for index, region in enumerate(self._regions):
            try:
                lanes, proven = self._hash_settled(index)
            except StateHashMismatch:  # a widened element holds what no published one can
                wrong.add(region.tensor)
                continue
            passed[index] = lanes - proven  # zero when right
            if passed[index].any():
                wrong.add(region.tensor)
        proven_now = self._proven
        return msg.Audited(
            number=number,
            version=proven_now.version,
            wrong=tuple(sorted(wrong)),
            lanes=proven_now.lanes + passed,
            seconds=time.perf_counter() - begin,
        )

    def _hash_settled(self, index: int) -> tuple[Lanes, Lanes]:
        """A region's lanes by a full pass, and its proven lanes then: taken again if a commit came between.

        Raises:
            StateHashMismatch: a widened element holds what no published one can, and no commit was writing it.
        """
        while True:
            writes, proven = self._writes, self._proven
            try:
                lanes = self._hash(index)
            except StateHashMismatch:
                if writes % 2 == 0 and writes == self._writes:
                    raise
                continue
            if writes % 2 == 0 and writes == self._writes:
                assert proven is not None
                return lanes, proven.lanes[index]

    def _hash(self, index: int) -> Lanes:
        region = self._regions[index]
        with self._backend.aside():
            return self._memory.hash(region, self._specs[region.tensor].dtype, self._seeds[region.tensor])
