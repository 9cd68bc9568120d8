"""Layers by the versions at their ends: kept in memory, read from the store, or composed of others.

Does not write anything. Not for use from several threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from vllm_delta_sync.errors import BaseNeeded, VersionGap
from vllm_delta_sync.log import layers
from vllm_delta_sync.log.layers import End, Layer
from vllm_delta_sync.log.plan import Edge, plan
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire.catalog import Catalog, Fold
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest
from vllm_delta_sync.wire.payload import Payload
from vllm_delta_sync.wire.state_hash import Lanes

MEMORY_BYTES = 256 << 20
MODEL_SHARE = 8  # one part in so many of a model's size may be kept of its changes, if that is more
_KEPT_ENDS = 4096  # versions


class Shelf:
    """The layers of one branch of a run.

    Args:
        pointer: what LATEST says; `see` tells of what it says later.
        memory_bytes: of encoded layers kept in memory, at most; the ones used longest ago go first.
        threads: tensors composed at a time.
    """

    def __init__(
        self, log: DeltaLog, pointer: LatestPointer, *, memory_bytes: int = MEMORY_BYTES, threads: int = 1
    ) -> None:
        self.memory_bytes = memory_bytes
        self._log = log
        self._pointer = pointer
        self._route = Route(log)
        self._threads = threads
        self._kept: OrderedDict[tuple[int, int], Layer] = OrderedDict()
        self._ends: OrderedDict[int, End] = OrderedDict()
        self._unit = 1  # bytes of a delta, about

    def see(self, pointer: LatestPointer) -> None:
        """Take note of what LATEST says now."""
        self._pointer = pointer

    def add(self, layer: Layer) -> None:
        """Keep a layer in memory, as long as it is used and there is room."""
        for end in (layer.source, layer.to):
            self._ends[end.version] = end
        while len(self._ends) > _KEPT_ENDS:
            self._ends.popitem(last=False)
        if layer.to.version == layer.source.version + 1:
            self._unit = max(1, layer.stored)
        self._kept[layer.source.version, layer.to.version] = layer
        self._kept.move_to_end((layer.source.version, layer.to.version))
        while len(self._kept) > 1 and sum(kept.stored for kept in self._kept.values()) > self.memory_bytes:
            self._kept.popitem(last=False)

    def catalog(self) -> Catalog:
        """The run's folds and anchors, as far as was seen."""
        return self._route.catalog(self._pointer)

    def end(self, version: int) -> End:
        """A version's state root and manifest. Raises VersionGap when it is none of this branch, or gone."""
        if version in self._ends:
            return self._ends[version]
        if not 0 <= version <= self._pointer.version:
            raise VersionGap(
                f"{self._log.store.uri}: there is no version {version}; the log holds 0 to {self._pointer.version}"
            )
        ref = self._route.reference(self._pointer, version)
        return End(version, self._route.manifest(ref).state_root, ref)

    def layer(self, source: int, to: int) -> Layer:
        """All changes from `source` to a later version as a fold states them, put together from the fewest bytes.

        Raises:
            VersionGap: deltas in between are gone and no fold leads over them, or there is no such version.
            BaseNeeded: what is at hand cannot be composed, or told, without the values before it.
        """
        if not 0 <= source < to:
            raise VersionGap(f"{self._log.store.uri}: no changes lead from version {source} on to {to}")
        oldest = self.catalog().oldest
        sizes = {(version - 1, version): self._unit for version in range(max(source, oldest) + 1, to + 1)}
        sizes.update((ends, fold.totals.bytes) for ends, fold in self._folds().items())
        sizes.update((ends, layer.stored) for ends, layer in self._kept.items())
        edges = [Edge(*ends, size) for ends, size in sizes.items() if source <= ends[0] and ends[1] <= to]
        try:
            return layers.of_fold(self._composed(plan(edges, source, to)))
        except BaseNeeded as error:  # a delta in the log need not tell its changes; a fold does
            telling = {*self._kept, *self._folds()}
            try:
                way = plan([edge for edge in edges if (edge.source, edge.to) in telling], source, to)
            except VersionGap:
                raise error from None
        return layers.of_fold(self._composed(way))

    def lanes(self, version: int, names: Iterable[str]) -> dict[str, Lanes]:
        """The state hash u32[4] of these tensors at a version, by name, from the tables that state it last.

        Raises BaseNeeded when one was last changed by a delta that is gone.
        """
        wanted = set(names)
        found: dict[str, Lanes] = {}
        for payload in self._stating(version):
            table = self._log.table(payload)
            for spec, lanes in zip(table.tensors, table.hashes, strict=True):
                if spec.name in wanted:
                    found[spec.name] = lanes
                    wanted.discard(spec.name)
            if not wanted:
                return found
        raise BaseNeeded(
            f"{self._log.store.uri}: what tensor {min(wanted)!r} was at version {version} is stated only by deltas "
            "that are gone; give the base"
        )

    def _stating(self, version: int) -> Iterator[Payload]:
        """What holds states at a version: the fold that lists most, then deltas of ever older ones, then the base."""
        folds = [fold for ends, fold in self._folds().items() if ends[1] == version]
        yield from sorted(folds, key=lambda fold: -fold.totals.changed)[:1]
        oldest = self.catalog().oldest
        for number in range(version, oldest, -1):
            yield self._manifest(number)
        if not oldest or not version:
            yield self._manifest(0)

    def _composed(self, edges: Sequence[Edge]) -> Layer:
        if len(edges) > 1:  # halves, so that nothing is composed often and few layers are held at a time
            half = len(edges) // 2
            return layers.compose(self._composed(edges[:half]), self._composed(edges[half:]), threads=self._threads)
        source, to = edges[0].source, edges[0].to
        assert source is not None, "no anchor is among the edges"
        if (kept := self._kept.get((source, to))) is not None:
            self._kept.move_to_end((source, to))
            return kept
        payload = self._folds().get((source, to)) or self._manifest(to)
        table = self._log.table(payload)
        layers.require_told(table)
        layer = layers.of_payload(self.end(source), self.end(to), table, self._log.blocks(payload, table.blocks))
        self.add(layer)
        return layer

    def _folds(self) -> dict[tuple[int, int], Fold]:
        """The folds that lead forwards."""
        return {(fold.source, fold.to): fold for fold in self.catalog().folds if fold.source < fold.to}

    def _manifest(self, version: int) -> Manifest:
        return self._route.manifest(self.end(version).manifest)
