"""The background of a publisher that writes folds by a schedule, and anchors where they are due.

Does not decide which: `schedule` does. Never fails or delays a publish: what does not come about is logged, and the
folds of later versions do without it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from vllm_delta_sync.errors import BaseNeeded, DeltaSyncError, VersionGap
from vllm_delta_sync.log import anchoring, folding
from vllm_delta_sync.log.anchoring import Checkpoint
from vllm_delta_sync.log.discarding import discarding
from vllm_delta_sync.log.layers import End, Layer
from vllm_delta_sync.log.schedule import AnchorPolicy, FoldSchedule, prune, with_folds
from vllm_delta_sync.log.shelf import Shelf
from vllm_delta_sync.log.writer import LogWriter
from vllm_delta_sync.store import Batch, together
from vllm_delta_sync.wire.catalog import Anchor, Catalog, Fold

logger = logging.getLogger(__name__)

_MOST_WAITING = 128  # versions; beyond, folding is slower than publishing, and the oldest get no folds
_TAKEN_UP = 32  # versions before the one a publisher begins at, whose folds the one before may not have come to
PATIENCE_S = 15.0
"""Seconds for which a catalog waits for the next version to be named with it, where every request counts."""


class Frozen(Checkpoint, Protocol):
    """A state that the publisher held, while it moves on."""

    @property
    def state_root(self) -> str:
        """Of the whole model."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the version that it is was taken back."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Anchorage:
    """What it takes to write anchors."""

    policy: AnchorPolicy
    full_bytes: int  # of a copy of the model
    freeze: Callable[[], AbstractContextManager[Frozen]]  # the publisher's state now


@dataclass(frozen=True, slots=True)
class _Bin:
    """Where shards of folds go, and the names of those that went there."""

    batch: Batch
    keys: list[str]


class Folder:
    """The thread that folds. Its methods return at once, except `close`.

    It begins with the folds that are missing at the newest versions there are, which a publisher that was killed did
    not come to.

    Args:
        writer: the publisher's; only what has to do with catalogs is called here, while `turn` is held.
        turn: held while anybody writes through the writer, which only one thread may do at a time.
        shelf: the writer's log, with layers that are at hand.
    """

    def __init__(
        self,
        writer: LogWriter,
        schedule: FoldSchedule | None,
        anchorage: Anchorage | None,
        turn: threading.Lock,
        shelf: Shelf,
    ) -> None:
        self._writer = writer
        self._schedule = schedule
        self._anchorage = anchorage
        self._turn = turn
        self._shelf = shelf
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Layer | None]] = deque()
        tip = End(writer.tip.version, writer.tip.state_root, writer.pointer.manifest)
        if schedule is not None:
            first = max(1, tip.version - _TAKEN_UP + 1)
            self._waiting += [(version, None) for version in range(first, tip.version + 1)]
        self._began = tip.version
        self._durable: deque[End] = deque([tip], maxlen=2 * _MOST_WAITING)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="delta-sync-fold", daemon=True)
        self._thread.start()

    def published(self, end: End, layer: Layer | None) -> None:
        """A version is durable. `layer`: its changes; None where they are to be had from the log only."""
        with self._changed:
            held = sum(waiting.stored for _, waiting in self._waiting if waiting is not None)
            self._waiting.append((end.version, layer if held < self._shelf.memory_bytes else None))
            self._durable.append(end)
            self._changed.notify_all()

    def close(self, *, finish: bool) -> None:
        """End the thread, with `finish` once what is due for the versions published is written."""
        with self._changed:
            self._stopping = True
            if not finish:
                self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            version, layer = found
            try:
                if layer is not None:
                    self._shelf.add(layer)
                self._after(version)
            except DeltaSyncError as error:
                logger.warning("no folds to version %d of %s: %s", version, self._writer.log.store.uri, error)
            except Exception:  # the one loop of this thread: whatever it is, publishing goes on without these folds
                logger.exception("no folds to version %d of %s", version, self._writer.log.store.uri)
        self._name()

    def _next(self) -> tuple[int, Layer | None] | None:
        """What was published next; None at the end. While nothing is, a catalog that has waited enough is named."""
        while not self._wait(PATIENCE_S if self._writer.offered else None):
            self._name()
        with self._changed:
            while len(self._waiting) > _MOST_WAITING:
                late, _ = self._waiting.popleft()
                logger.warning("folding is slower than publishing: version %d gets no folds", late)
            return self._waiting.popleft() if self._waiting else None

    def _wait(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping or bool(self._waiting), seconds)

    def _name(self) -> None:
        """Let LATEST name the catalog that no version took along, if there is one."""
        try:
            with self._turn:
                self._writer.put_offered()
        except DeltaSyncError as error:
            logger.warning("the newest folds and anchors of %s wait: %s", self._writer.log.store.uri, error)

    def _after(self, version: int) -> None:
        """Write what is due at a version, and the catalog with it."""
        self._shelf.see(self._writer.pointer)
        store = self._writer.log.store
        folds: list[Fold] = []
        anchors: list[Anchor] = []
        keys: list[str] = []

        def change(catalog: Catalog) -> Catalog:
            found = anchoring.with_anchors(with_folds(catalog, folds), anchors)
            return prune(found, version, self._writer.pointer.pin)

        draft = None
        with discarding(store, keys), together(store) as batch:
            self._compose(version, _Bin(batch, keys), folds, anchors)
            if not folds and not anchors:
                return
            if store.metered:  # with the folds in one request, and later with a version in another
                with self._turn:
                    draft = self._writer.draft_catalog(change, batch)
        with self._turn:
            if draft is None:
                self._writer.put_catalog(change)
            else:
                self._writer.offer_catalog(draft)

    def _compose(self, version: int, into: _Bin, folds: list[Fold], anchors: list[Anchor]) -> None:
        if self._schedule is not None:
            with self._changed:
                waiting = [later for later, _ in self._waiting]
            for source, to in self._schedule.missing(self._shelf.catalog(), version, version, waiting):
                folds += self._fold(source, to, into)
        if self._anchorage is not None and version > self._began and version % self._anchorage.policy.every == 0:
            self._look(self._anchorage, version, into, folds, anchors)

    def _fold(self, source: int, to: int, into: _Bin) -> list[Fold]:
        try:
            layer = self._shelf.layer(source, to)
            fold = folding.put(into.batch, self._writer.log.run, layer, self._writer.tip.totals, into.keys)
        except (BaseNeeded, VersionGap) as error:  # not to be had from what changes tell, or from what gc left
            logger.info("no fold from version %d to %d: %s", source, to, error)
            return []
        except DeltaSyncError as error:
            logger.warning("no fold from version %d to %d: %s", source, to, error)
            return []
        self._shelf.add(layer)
        return [fold]

    def _look(self, anchorage: Anchorage, version: int, into: _Bin, folds: list[Fold], anchors: list[Anchor]) -> None:
        """Add the fold from the last anchor (or the base) to `folds`, or an anchor to `anchors` where that is due."""
        origin = max((known.version for known in self._shelf.catalog().anchors if known.version < version), default=0)
        try:
            folded = self._shelf.layer(origin, version).stored
        except (BaseNeeded, VersionGap) as error:
            logger.info("from version %d, the last anchor or the base, no fold leads to %d: %s", origin, version, error)
            folded = None
        if not anchorage.policy.due(folded, anchorage.full_bytes):
            if all((fold.source, fold.to) != (origin, version) for fold in folds):
                folds += self._fold(origin, version, into)
            return
        try:
            with anchorage.freeze() as frozen:
                if (end := self._wait_for(frozen)) is None:
                    logger.warning("no anchor at version %d: what was to be written was taken back", version)
                    return
                anchors.append(anchoring.put(self._writer.log, end, frozen))
        except (DeltaSyncError, OSError) as error:
            logger.warning("no anchor at version %d: %s", version, error)

    def _wait_for(self, frozen: Frozen) -> End | None:
        """The version that a frozen state is, once it is durable; None if it never will be."""

        def found() -> End | None:  # the newest: of an older one in the same state, the manifest may be gone
            return next((end for end in reversed(self._durable) if end.state_root == frozen.state_root), None)

        with self._changed:
            while (end := found()) is None and not frozen.lost and not self._stopping:
                self._changed.wait(1.0)  # nobody tells that a version was taken back
            return end
