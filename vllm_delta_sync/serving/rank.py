"""One rank's weights and the version they are at: join, stage, commit, roll back, audit.

Knows the log, the layout and live memory; no thread, no channel, no vLLM. `trace`, `commit` and `rollback` run on the
worker's main thread (between two steps), everything else in the background.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from vllm_delta_sync import kernels
from vllm_delta_sync.errors import DigestMismatch, Poisoned, StateError, StateHashMismatch, VersionGap
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.layout import Layout, trace
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.messages import Lanes, Ref
from vllm_delta_sync.serving.staging import Effect, stage
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.table import VersionTable

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class _Staged:
    ref: Ref
    before: Ref
    effect: Effect
    hashes: Lanes  # of every tensor, after this version


@dataclass(frozen=True)
class _Proven:
    """Lanes that the live regions are proven to have, uint32 [regions, 4], at a version."""

    version: int
    lanes: Lanes


class Rank:
    """See the module. Errors are those of the tree in `errors`; after any of them live memory is as it was.

    Args:
        number: this rank's number in the engine; rank 0 also checks state roots.
        backend: makes the kernels for the device that holds the weights.
    """

    def __init__(self, number: int, backend: Callable[[torch.device], kernels.Backend]) -> None:
        self.number = number
        self._make_backend = backend
        self.log: DeltaLog | None = None
        self.base: VersionTable | None = None
        self.layout: Layout | None = None
        self.memory: LiveMemory | None = None
        self._held: Ref | None = None
        self._hashes: Lanes = np.zeros((0, 4), dtype=np.uint32)
        self._hashes_before: Lanes = self._hashes
        self._staged: _Staged | None = None
        self._undo: _Staged | None = None
        self._proven: _Proven | None = None
        self._writes = 0  # odd while a commit is under way

    # --- joining -----------------------------------------------------------------------------------------------------
    def load_base(self, log: DeltaLog, base: Ref) -> None:
        """Read version 0: what tensors there are, and their hashes."""
        table = log.table(log.manifest(base.to_object()))
        self.log, self.base = log, table
        self._index = {spec: i for i, spec in enumerate(table.tensors)}
        self._by_name = {spec.name: spec for spec in table.tensors}
        self._seeds = {spec.name: state_hash.seed(spec) for spec in table.tensors}

    def trace(self, model: torch.nn.Module) -> RankLayout:
        """Main thread: find where this rank keeps each tensor."""
        assert self.base is not None
        self.layout = trace(model, self.base.tensors)
        flat = self.layout.flat_tensors(model)
        device = flat[0].device if flat else torch.device("cpu")
        self.backend = self._make_backend(device)
        self.memory = LiveMemory(flat, self.backend)
        self._places = self.layout.places(model)
        self._regions_of: dict[str, list[int]] = defaultdict(list)
        for index, region in enumerate(self.layout.regions):
            self._regions_of[region.tensor].append(index)
        return RankLayout(self.layout.regions, self.layout.unsupported)

    def prove(self) -> msg.Proved:
        """Full pass over all regions."""
        begin = time.perf_counter()
        self._proven = _Proven(-1, self._pass())
        return msg.Proved(self._proven.lanes, time.perf_counter() - begin)

    def join(self, ref: Ref) -> None:
        """The proven weights are those of this version."""
        assert self._proven is not None and self.base is not None and self.log is not None
        hashes = self.base.hashes.copy()
        if ref.version:
            for manifest in self.log.chain(0, self.log.manifest(ref.to_object())):
                self._advance(hashes, self.log.table(manifest))
        self._proven = _Proven(ref.version, self._proven.lanes)
        self._held, self._hashes = ref, hashes

    # --- following ---------------------------------------------------------------------------------------------------
    def stage(self, ref: Ref) -> msg.Staged:
        """Fetch, verify, decode and map a version; nothing live is touched."""
        assert self.log is not None and self.layout is not None and self.memory is not None
        held = self._held
        assert held is not None
        self._staged = self._undo = None
        begin = time.perf_counter()
        manifest = self.log.manifest(ref.to_object())
        _require_child(manifest, held)
        table = self.log.table(manifest)
        table.require_known(self._by_name, f"version {ref.version}")
        fetching = _Stopwatch()
        blocks = fetching.over(self.log.block_bytes(manifest, table))
        fetching.seconds = time.perf_counter() - begin
        effect = stage(blocks, self.layout.regions, self._regions_of, self._seeds, self.memory)
        after = self._hashes.copy()
        tensors = self._advance(after, table)
        if self.number == 0:
            self._check_root(manifest, after)
        self._staged = _Staged(ref, held, effect, after)
        return msg.Staged(
            version=ref.version,
            regions=effect.regions,
            lanes=effect.lanes,
            tensors=tuple(tensors),
            effects=after[tensors] - self._hashes[tensors],
            fetched_bytes=manifest.totals.bytes,
            changed=manifest.totals.changed,
            step=manifest.step,
            fetch_seconds=fetching.seconds,
            stage_seconds=time.perf_counter() - begin - fetching.seconds,
        )

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged = None

    def commit(self, version: int) -> int:
        """Main thread: write the staged version; returns how many live elements were written.

        Raises:
            StrayWrite, UnsupportedLayout: nothing was written.
        """
        staged = self._staged
        if staged is None or staged.ref.version != version:
            raise StateError(f"version {version} is not staged on rank {self.number}")
        self._places.assert_unmoved()
        self._write(staged.effect, staged.ref, staged.hashes, undo=False)
        self._undo, self._staged = staged, None
        return sum(patch.elements for patch in staged.effect.patches)

    def rollback(self, version: int) -> None:
        """Main thread: back to the version before, if this rank had committed `version`; else nothing."""
        undo = self._undo
        if undo is None or undo.ref.version != version:
            return
        assert self.layout is not None
        try:
            self._write(undo.effect, undo.before, self._hashes_before, undo=True)
        except StateError as error:
            raise Poisoned(f"rank {self.number} cannot go back from version {version}: {error}") from error
        self._undo = None

    # --- audit -------------------------------------------------------------------------------------------------------
    def audit(self, number: int) -> msg.Audited:
        """Full pass while steps and commits go on; what commits change meanwhile is accounted for, region by region."""
        assert self.layout is not None and self._proven is not None and self.memory is not None
        begin = time.perf_counter()
        passed = np.zeros_like(self._proven.lanes)
        wrong = []
        for index in range(len(self.layout.regions)):
            try:
                lanes, proven = self._hash_settled(index)
            except StateHashMismatch:  # a widened element holds what no published one can
                wrong.append(self.layout.regions[index].tensor)
                continue
            passed[index] = lanes - proven  # zero when right
            if passed[index].any():
                wrong.append(self.layout.regions[index].tensor)
        proven_now = self._proven
        return msg.Audited(
            number=number,
            version=proven_now.version,
            wrong=tuple(sorted(set(wrong))),
            lanes=proven_now.lanes + passed,
            seconds=time.perf_counter() - begin,
        )

    @property
    def version(self) -> int | None:
        return None if self._held is None else self._held.version

    @property
    def staged_version(self) -> int | None:
        return None if self._staged is None else self._staged.ref.version

    # --- parts -------------------------------------------------------------------------------------------------------
    def _write(self, effect: Effect, ref: Ref, hashes: Lanes, *, undo: bool) -> None:
        assert self.memory is not None and self._proven is not None
        patches = [patch.reversed() if undo else patch for patch in effect.patches]
        lanes = self._proven.lanes.copy()
        touched = list(effect.regions)
        lanes[touched] = lanes[touched] - effect.lanes if undo else lanes[touched] + effect.lanes
        self._writes += 1
        try:
            self.memory.scatter(patches)
            self._proven = _Proven(ref.version, lanes)
            self._hashes_before, self._hashes, self._held = self._hashes, hashes, ref
        finally:
            self._writes += 1

    def _hash_settled(self, index: int) -> tuple[Lanes, Lanes]:
        """A region's lanes by a full pass, and its proven lanes at that moment: taken again if a commit "
        "came between."""
        while True:
            writes, proven = self._writes, self._proven
            lanes = self._hash(index)
            if writes % 2 == 0 and writes == self._writes:
                assert proven is not None
                return lanes, proven.lanes[index]

    def _hash(self, index: int) -> Lanes:
        assert self.layout is not None and self.memory is not None
        region = self.layout.regions[index]
        return self.memory.hash(region, self._by_name[region.tensor].dtype, self._seeds[region.tensor])

    def _pass(self) -> Lanes:
        assert self.layout is not None
        count = len(self.layout.regions)
        return np.array([self._hash(index) for index in range(count)], dtype=np.uint32).reshape(count, 4)

    def _advance(self, hashes: Lanes, table: VersionTable) -> list[int]:
        """Put a delta's hashes into `hashes`; returns the tensors' indices in the base table."""
        tensors = [self._index[spec] for spec in table.tensors]
        hashes[tensors] = table.hashes
        return tensors

    def _check_root(self, manifest: Manifest, hashes: Lanes) -> None:
        assert self.base is not None
        root = state_hash.state_root(dict(zip(self.base.tensors, hashes, strict=True)))
        if root != manifest.state_root:
            raise DigestMismatch(
                f"version {manifest.version}: its table leads to state root {root[:12]}…, its manifest "
                f"says {manifest.state_root[:12]}…"
            )


class _Stopwatch:
    """Time spent waiting for an iterator, apart from what is done between its items."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        iterator = iter(items)
        while True:
            begin = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - begin
            yield item


def _require_child(manifest: Manifest, held: Ref) -> None:
    parent = manifest.parent
    if manifest.version != held.version + 1 or parent is None or parent.sha256 != held.sha256:
        raise VersionGap(
            f"version {manifest.version} does not follow version {held.version} that is served: its parent is "
            f"{parent.sha256[:12] if parent else 'none'}…, served is {held.sha256[:12]}…"
        )
