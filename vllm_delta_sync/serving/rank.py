"""One rank's weights and the version they are at: join, stage, commit, roll back, audit.

Knows the log, the layout and live memory; no thread, no channel, no vLLM. `trace`, `commit` and `rollback` run on the
worker's main thread (between two steps), everything else in the background.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from vllm_delta_sync import kernels
from vllm_delta_sync.errors import DigestMismatch, Poisoned, StateError, VersionGap
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.serving import course, effects
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.books import Books, Staged
from vllm_delta_sync.serving.effects import Ground
from vllm_delta_sync.serving.layout import Layout, trace
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.messages import Lanes, Place
from vllm_delta_sync.serving.needs import needs_of
from vllm_delta_sync.serving.reserve import Reserve
from vllm_delta_sync.serving.running_lanes import RunningLanes
from vllm_delta_sync.serving.staging import Effect
from vllm_delta_sync.serving.stopwatch import Stopwatch
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import ObjectRef
from vllm_delta_sync.wire.table import VersionTable


class Rank:
    """See the module. Errors are those of the tree in `errors`; after any of them live memory is as it was.

    Args:
        number: this rank's number in the engine; rank 0 also checks state roots.
        backend: makes the kernels for the device that holds the weights.
        max_staged_bytes: what the changes of one step may take.
        cache: what the ranks of this node share of what they fetch.
        device_staged_bytes: of that, what a device that is not the CPU sets aside; None for a share of the weights.
    """

    def __init__(
        self,
        number: int,
        backend: Callable[[torch.device], kernels.Backend],
        max_staged_bytes: int,
        cache: NodeCache | None,
        device_staged_bytes: int | None = None,
    ) -> None:
        self.number = number
        self._make_backend = backend
        self._max_staged_bytes = max_staged_bytes
        self._device_staged_bytes = device_staged_bytes
        self._cache = cache
        self._reserve: Reserve | None = None
        self._fetcher: Fetcher | None = None
        self.log: DeltaLog | None = None
        self.base: VersionTable | None = None
        self.layout: Layout | None = None
        self.memory: LiveMemory | None = None
        self._books: Books | None = None
        self._staged: Staged | None = None
        self._undo: Staged | None = None
        self._running: RunningLanes | None = None  # of the layout

    def set_aside(self, model: torch.nn.Module) -> Reserve:
        """Main thread: take what following needs of the device before the KV cache does, once. Raises ConfigError."""
        if self._reserve is None:
            self._reserve = Reserve.beside(model, self._make_backend, self._device_staged_bytes, self._max_staged_bytes)
        return self._reserve

    # --- joining -----------------------------------------------------------------------------------------------------
    def load_base(self, log: DeltaLog, base: ObjectRef) -> bool:
        """Read version 0 of a run: what tensors there are, and their hashes. What was held of another run is forgotten.

        Returns whether they are the very tensors whose layout is known already.
        """
        manifest = log.manifest(base)
        if manifest.version != 0:
            raise VersionGap(f"{log.store.uri}/{base.key}: version {manifest.version}, which LATEST calls the base")
        table = log.table(manifest)
        known = self.base is not None and self.layout is not None and self.base.tensors == table.tensors
        self._books = self._staged = self._undo = None
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
        self.log, self.base = log, table
        if not known:
            self.layout = self._running = None
            self._by_name = {spec.name: spec for spec in table.tensors}
            self._seeds = {spec.name: state_hash.seed(spec) for spec in table.tensors}
        return known

    def trace(self, model: torch.nn.Module) -> RankLayout:
        """Main thread: find where this rank keeps each tensor."""
        assert self.base is not None
        self.layout = trace(model, self.base.tensors)
        flat = self.layout.flat_tensors(model)
        reserve = self.set_aside(model)
        reserve.open_work()
        self.backend = reserve.backend
        self.backend.settle()  # loading the model may have left something under way
        self.memory = LiveMemory(flat, self.backend, reserve.arena)
        self._places = self.layout.places(model)
        self._regions_of: dict[str, list[int]] = defaultdict(list)
        for index, region in enumerate(self.layout.regions):
            self._regions_of[region.tensor].append(index)
        self._running = RunningLanes(self.layout.regions, self._by_name, self._seeds, self.memory, self.backend)
        return RankLayout(self.layout.regions, self.layout.unsupported)

    def prove(self) -> msg.Proved:
        """Full pass over all regions, from where they will stay."""
        assert self._running is not None and self.memory is not None
        self.memory.prefer_huge_pages()
        return self._running.prove()

    def join(self, place: Place | None, lanes: Lanes) -> None:
        """The proven weights have these hashes, uint32 [tensors, 4]: those of a version, or of none."""
        assert self._running is not None and self.log is not None and self.layout is not None and self.base is not None
        self._running.name(place.version if place else None)
        self._fetcher = Fetcher(self.log.store, self._cache, needs_of(self.layout.regions, self.base.tensors))
        self._books = Books(place, lanes)

    # --- following ---------------------------------------------------------------------------------------------------
    def stage(self, hop: Hop) -> msg.Staged:
        """Fetch, verify, decode and map a step; nothing live is touched."""
        books, fetcher = self._books, self._fetcher
        assert books is not None and fetcher is not None
        self._staged = self._undo = None
        course.require_follows(hop, books.place)
        begin = time.perf_counter()
        clock = Stopwatch()
        fetched, cached = fetcher.fetched_bytes, fetcher.cached_bytes
        with self.backend.aside():
            if hop.checkpoint is None:
                fetched = cached = 0  # the fetcher begins to count with a table
                effect, hashes = effects.of_blocks(hop, self._ground(), fetcher, books.hashes, clock)
            else:
                effect, hashes = effects.of_anchor(hop, hop.checkpoint, self._ground(), fetcher, clock)
        if self.number == 0:
            self._check_root(hop, hashes)
        changed = np.flatnonzero((hashes != books.hashes).any(axis=1))
        failure = fetcher.take_cache_failure()
        self._staged = Staged(hop, books, Books(Place(hop.to, hop.target, hop.after), hashes), effect)
        return msg.Staged(
            version=hop.to,
            regions=effect.regions,
            lanes=effect.lanes,
            tensors=tuple(changed.tolist()),
            effects=hashes[changed] - books.hashes[changed],
            fetched_bytes=fetcher.fetched_bytes - fetched,
            cached_bytes=fetcher.cached_bytes - cached,
            cache_failure=None if failure is None else str(failure),
            changed=hop.totals.changed if hop.totals else effect.elements,
            step=hop.step,
            fetch_seconds=clock.seconds,
            stage_seconds=time.perf_counter() - begin - clock.seconds,
        )

    def _ground(self) -> Ground:
        assert self.log is not None and self.base is not None and self.layout is not None and self.memory is not None
        return Ground(
            self.log,
            self.base,
            self._by_name,
            self._seeds,
            self.layout.regions,
            self._regions_of,
            self.memory,
            self._max_staged_bytes,
        )

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged = None

    def commit(self, version: int) -> int:
        """Main thread: write the staged step to `version`; returns how many live elements were written.

        Raises:
            StrayWrite, UnsupportedLayout: nothing was written.
        """
        staged = self._staged
        if staged is None or staged.hop.to != version:
            raise StateError(f"version {version} is not staged on rank {self.number}")
        self._places.assert_unmoved()
        self._write(staged.effect, staged.after, undo=False)
        self._undo, self._staged = staged, None
        return staged.effect.elements

    def rollback(self, version: int) -> None:
        """Main thread: back to the version before, if this rank had committed `version`; else nothing."""
        undo = self._undo
        if undo is None or undo.hop.to != version:
            return
        try:
            self._write(undo.effect, undo.before, undo=True)
        except StateError as error:
            raise Poisoned(f"rank {self.number} cannot go back from version {version}: {error}") from error
        self._undo = None

    # --- audit -------------------------------------------------------------------------------------------------------
    def audit(self, number: int) -> msg.Audited:
        """Full pass while steps and commits go on; what commits change meanwhile is accounted for, region by region."""
        assert self._running is not None
        return self._running.audit(number)

    @property
    def version(self) -> int | None:
        """The version held; None for weights of no version, and before any is known."""
        return None if self._books is None or self._books.place is None else self._books.place.version

    @property
    def staged_version(self) -> int | None:
        return None if self._staged is None else self._staged.hop.to

    # --- parts -------------------------------------------------------------------------------------------------------
    def _write(self, effect: Effect, books: Books, *, undo: bool) -> None:
        assert self.memory is not None and self._running is not None
        patches = [patch.reversed() if undo else patch for patch in effect.patches]
        lanes = np.negative(effect.lanes) if undo else effect.lanes
        with self._running.writing(effect.regions, lanes, books.place.version if books.place else None):
            self.memory.scatter(patches)
            self._books = books

    def _check_root(self, hop: Hop, hashes: Lanes) -> None:
        assert self.base is not None
        root = state_hash.state_root(dict(zip(self.base.tensors, hashes, strict=True)))
        if root != hop.after:
            raise DigestMismatch(
                f"the {hop.kind} to version {hop.to}: its table leads to state root {root[:12]}…, that of the version "
                f"is {hop.after[:12]}…"
            )
