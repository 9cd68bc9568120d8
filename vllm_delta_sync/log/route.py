"""The next hop of a follower: which delta, fold or anchor to take from the version held towards its goal.

Does not fetch tables or shards, and applies nothing. Not for use from several threads at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from vllm_delta_sync.errors import DigestMismatch, LogError, MalformedObject, NotFound, VersionGap
from vllm_delta_sync.log.branch import Branch
from vllm_delta_sync.log.plan import Edge, admissible, quickest
from vllm_delta_sync.wire.catalog import Anchor, Catalog, Fold
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest, ObjectRef

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog

logger = logging.getLogger(__name__)

Way: TypeAlias = Fold | Anchor | Manifest | int  # version 0 for its own anchor; the number of a version for its delta


class Route:
    """Chooses hop after hop through a run. Remembers manifests by digest, and the last catalog."""

    def __init__(self, log: DeltaLog) -> None:
        self.log = log
        self._catalog: tuple[ObjectRef | None, Catalog] = None, Catalog(run=log.run)
        self._branch = Branch(log)
        self._avoided: set[tuple[str, str]] = set()
        self._too_much: int | None = None  # elements of a fold that changes more than its taker has room for
        self._told: set[tuple[str, str]] = set()

    def next_hop(
        self, pointer: LatestPointer, held: ObjectRef | None, held_version: int | None, goal: int
    ) -> Hop | None:
        """The first hop of the quickest way from the version held to `goal`; None when that is held.

        No way leads over a version older than both, nor over one newer than both unless it cannot go back otherwise.

        Args:
            pointer: what LATEST says; `goal` is at most its version.
            held: the manifest of the version held; None, and no version, where only an anchor leads on.

        Raises VersionGap when no way leads there or LATEST contradicts the manifest it names, and what reading the
        catalog and manifests raises.
        """
        if held_version == goal:
            if held is not None and goal == pointer.version and held.sha256 != pointer.manifest.sha256:
                raise VersionGap(self._elsewhere(held, goal))
            return None
        if (tip := self._tip_after(pointer, held, held_version, goal)) is not None:
            return tip
        barred: set[Edge] = set()
        failure: LogError | NotFound | None = None
        while True:
            ways = self.ways(pointer, held_version, goal)
            try:
                edge = self._choose(ways, barred, held_version, goal)[0]
            except VersionGap as error:
                if failure is not None:
                    raise failure from None
                branch = f"; {self._elsewhere(held, held_version)}" if held is not None and barred else ""
                raise VersionGap(f"{self.log.store.uri}: {error}{branch}") from None
            try:
                hop = self._hop(pointer, ways[edge])
            except (LogError, NotFound) as error:
                failure = failure or error
                self._tell(ways[edge], error)
            else:
                if self._follows(hop, held):
                    return hop
            barred.add(edge)

    def _tip_after(
        self, pointer: LatestPointer, held: ObjectRef | None, held_version: int | None, goal: int
    ) -> Hop | None:
        """The tip's delta, for whoever is one version behind it: nothing is cheaper, so no catalog is fetched."""
        if held is None or goal != pointer.version or held_version != goal - 1:
            return None
        manifest = self.manifest(pointer.manifest)
        follows = manifest.version == goal and manifest.parent is not None and manifest.parent.sha256 == held.sha256
        if not follows or _name(goal) in self._avoided:
            return None
        return Hop.over(manifest, pointer.manifest)

    def start(self, pointer: LatestPointer, base_bytes: int | None, goal: int) -> Hop | None:
        """The anchor at which to begin the quickest way to `goal`, or None to begin at version 0.

        Args:
            base_bytes: what version 0's checkpoint costs; None when it is not to be had.

        Raises VersionGap when no way leads to `goal`.
        """
        ways = {edge: way for edge, way in self.ways(pointer, None, goal).items() if not isinstance(way, Manifest)}
        edges = list(ways) if base_bytes is None else [*ways, Edge(None, 0, base_bytes)]
        try:
            first = quickest(edges, None, goal)[0]
        except VersionGap as error:
            raise VersionGap(f"{self.log.store.uri}: {error}") from None
        return self._hop(pointer, ways[first]) if first in ways else None

    def avoid(self, hop: Hop) -> bool:
        """Go another way than this hop, which could not be taken, as long as there is one; False if it was tried again.

        That it fails may pass, so when no other way is left it is offered again.
        """
        name = _name(hop)
        if name in self._avoided:
            return False
        self._avoided.add(name)
        return True

    def take_less(self, hop: Hop) -> None:
        """Go by smaller steps than this one, for which there is no room, as long as they lead on.

        For good, as room does not grow: no fold is taken that lists as many elements. An anchor is only avoided.
        """
        if hop.kind == "fold" and hop.totals is not None:
            self._too_much = min(hop.totals.changed, self._too_much or hop.totals.changed)
        else:
            self.avoid(hop)

    def ways(self, pointer: LatestPointer, held: int | None, goal: int) -> dict[Edge, Way]:
        """Every edge that may be part of a way from `held` to `goal`, with what it is."""
        catalog = self.catalog(pointer)
        found: dict[Edge, Way] = {}
        for fold in catalog.folds:
            found[Edge(fold.source, fold.to, fold.totals.bytes)] = fold
        for anchor in catalog.anchors:
            found[Edge(None, anchor.version, anchor.bytes + anchor.table.size)] = anchor
        if held is None or goal == 0:
            base = self.manifest(pointer.base)
            if base.anchor is not None:
                found[Edge(None, 0, sum(file.size for file in base.anchor.files))] = base
        # Going back, a way may lead over the tip, where the folds of a pin begin.
        first, last = (held or 0, goal) if held is None or held < goal else (goal, pointer.version)
        guess = self._branch.typical_size(pointer)
        for version in range(max(first, catalog.oldest) + 1, last + 1):
            found[Edge(version - 1, version, self._branch.size(version) or guess)] = version
        return {edge: way for edge, way in found.items() if edge.to <= pointer.version}

    def catalog(self, pointer: LatestPointer) -> Catalog:
        """The catalog that `pointer` names, fetched once; where it is lost or damaged, the last one that was not.

        An older one, or none, is no less sound: it only has fewer ways. Raises VersionGap as `DeltaLog.catalog` does.
        """
        known, catalog = self._catalog
        if pointer.catalog != known:
            try:
                catalog = self.log.catalog(pointer)
            except (DigestMismatch, MalformedObject, NotFound) as error:
                logger.warning("going on without the newest folds and anchors: %s", error)
            else:
                self._catalog = pointer.catalog, catalog
                self._avoided.clear()
                self._told.clear()
        self.log.require_reach(pointer, catalog)
        return catalog

    def manifest(self, ref: ObjectRef) -> Manifest:
        """The manifest of a reference, from memory if it was fetched lately."""
        return self._branch.manifest(ref)

    def reference(self, pointer: LatestPointer, version: int) -> ObjectRef:
        """The manifest of a version on the branch of `pointer`, from the nearest known one above it, or from the tip.

        Raises as `Branch.below` does.
        """
        if version > pointer.version:
            raise VersionGap(f"{self.log.store.uri}: there is no version {version}; the newest is {pointer.version}")
        near = min((known for known in self._landmarks(pointer) if known[0] >= version), key=lambda known: known[0])
        try:
            return self._branch.below(*near, version)
        except (LogError, NotFound):
            if near[1] == pointer.manifest:
                raise
        return self._branch.below(pointer.version, pointer.manifest, version)

    def _landmarks(self, pointer: LatestPointer) -> Iterable[tuple[int, ObjectRef]]:
        catalog = self.catalog(pointer)
        yield pointer.version, pointer.manifest
        yield 0, pointer.base
        yield from ((fold.to, fold.manifest) for fold in catalog.folds)
        yield from ((anchor.version, anchor.manifest) for anchor in catalog.anchors)

    def _choose(self, ways: dict[Edge, Way], barred: set[Edge], held: int | None, goal: int) -> list[Edge]:
        open_ways = [edge for edge in ways if edge not in barred]
        wanted = [edge for edge in open_ways if self._wanted(ways[edge])]
        attempts = [admissible(wanted, held, goal), admissible(open_ways, held, goal)]
        if held is not None and goal < held:
            attempts.append([edge for edge in open_ways if edge.to >= goal])
        for edges in attempts[:-1]:
            try:
                return quickest(edges, held, goal)
            except VersionGap:
                continue
        return quickest(attempts[-1], held, goal)

    def _wanted(self, way: Way) -> bool:
        if isinstance(way, Fold) and self._too_much is not None and way.totals.changed >= self._too_much:
            return False
        return _name(way) not in self._avoided

    def _hop(self, pointer: LatestPointer, way: Way) -> Hop:
        if isinstance(way, int):
            ref = self.reference(pointer, way)
            return Hop.over(self.manifest(ref), ref)
        if isinstance(way, Manifest):
            assert way.anchor is not None, "it is a way only with its anchor"
            return Hop.onto(way, pointer.base, way.anchor, None)
        kind, to, after = (
            ("fold", way.to, way.after) if isinstance(way, Fold) else ("anchor", way.version, way.state_root)
        )
        target = self.manifest(way.manifest)
        if (target.version, target.state_root) != (to, after):
            raise MalformedObject(
                f"{self.log.store.uri}: the catalog's {kind} to version {to} ends at state root {after}, but "
                f"{way.manifest.key} is version {target.version} with {target.state_root}"
            )
        if isinstance(way, Anchor):
            return Hop.onto(target, way.manifest, way.checkpoint, way.table)
        return Hop.over(way, way.manifest).model_copy(update={"step": target.step})

    def _follows(self, hop: Hop, held: ObjectRef | None) -> bool:
        if held is None or hop.kind == "anchor":
            return True
        if hop.parent is not None:
            return hop.parent.sha256 == held.sha256
        known = self._branch.state_root(held)  # not fetched for this: who takes the hop checks the state it begins at
        return known is None or hop.before == known

    def _tell(self, way: Way, error: Exception) -> None:
        name = _name(way)
        if name not in self._told:
            self._told.add(name)
            logger.warning("looking for a way around the %s %s: %s", *name, error)

    def _elsewhere(self, held: ObjectRef, version: int | None) -> str:
        return (
            f"version {version} as it is held ({held.key}) is not of the branch that LATEST of {self.log.store.uri} "
            "names; was the log repaired or written by two publishers?"
        )


def _name(way: Way | Hop) -> tuple[str, str]:
    """What tells one way from all others: its kind and the object it begins with."""
    if isinstance(way, int):
        return "delta", str(way)
    if isinstance(way, Fold):
        return "fold", way.shards[0].key
    if isinstance(way, Anchor):
        return "anchor", way.checkpoint.prefix
    if isinstance(way, Manifest):
        return "anchor", "" if way.anchor is None else way.anchor.prefix
    if way.kind == "delta":
        return "delta", str(way.to)
    return way.kind, way.shards[0].key if way.checkpoint is None else way.checkpoint.prefix
