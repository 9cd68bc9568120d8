"""Writing folds from a log: of a layer at hand, or between any two versions, in either direction.

Does not decide which folds are worth it: `schedule` does.
"""

from __future__ import annotations

import logging
import uuid

from vllm_delta_sync.errors import BaseNeeded, ConfigError, VersionGap
from vllm_delta_sync.log import layers, names, payload
from vllm_delta_sync.log.amend import amend
from vllm_delta_sync.log.base import Base
from vllm_delta_sync.log.discarding import discarding
from vllm_delta_sync.log.layers import Layer
from vllm_delta_sync.log.materialize import reconstructed
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.schedule import NEAR, FoldSchedule, prune, with_folds
from vllm_delta_sync.log.shelf import Shelf
from vllm_delta_sync.store import Batch, together
from vllm_delta_sync.wire import shard
from vllm_delta_sync.wire.catalog import Fold
from vllm_delta_sync.wire.manifest import LatestPointer, Totals
from vllm_delta_sync.wire.shard import Ends

logger = logging.getLogger(__name__)


def put(
    batch: Batch, run: str, layer: Layer, model: Totals, keys: list[str], *, shard_bytes: int = shard.TARGET_BYTES
) -> Fold:
    """Put a layer's shards; returns the fold for a catalog, which nothing names yet.

    Args:
        model: the totals of any version: their tensors and elements are the whole model's.
        keys: takes the names of what is put.
    """
    packed = pack(layer.updates(), shard_bytes)
    source, to = layer.source.version, layer.to.version
    payload.require_fits(packed, f"the fold from version {source} to {to}")
    own = names.shards(names.fold_prefix(source, to), uuid.uuid4().hex, len(packed.shards))
    keys += own
    written = payload.write(batch, Ends(run, source, to), packed, own)
    return Fold(
        source=source,
        to=to,
        before=layer.source.state_root,
        after=layer.to.state_root,
        manifest=layer.to.manifest,
        table=written.table,
        shards=written.shards,
        totals=written.totals(model.tensors, model.elements),
    )


def _put_alone(log: DeltaLog, layer: Layer, model: Totals) -> Fold:
    keys: list[str] = []
    with discarding(log.store, keys), together(log.store) as batch:
        return put(batch, log.run, layer, model, keys)


def write_fold(
    log: DeltaLog, source: int, to: int, base: Base = None, *, threads: int = 1, progress: Progress = silent
) -> Fold:
    """Write the fold from version `source` to `to`, older or newer, from the log; no catalog names it yet.

    It is composed of deltas and folds as they are in the log. Where they do not hold all it takes (a block in absolute
    values has no way back, deltas may be gone), the model is rebuilt at both versions and compared; that takes memory
    for both.

    Args:
        base: the checkpoint of version 0, as for `materialize`; used only in that case.

    Raises VersionGap when there is no such version or no way to it, ConfigError when a base is needed that was not
    given, and what reading and writing raise.
    """
    pointer = log.latest()
    shelf = Shelf(log, pointer, threads=threads)
    low, high = sorted((source, to))
    progress("composing", 0, 1)
    ends = shelf.end(source), shelf.end(to)
    try:
        layer = shelf.layer(low, high)
        if source > to:
            layer = layers.inverse(layer, shelf.lanes(low, layer.tensors))
    except (BaseNeeded, VersionGap) as error:
        logger.info("rebuilding versions %d and %d, as their changes do not do: %s", source, to, error)
        old = log.materialize(source, base, progress=progress)
        layer = layers.between(*ends, old, log.materialize(to, base, progress=progress))
    progress("composing", 1, 1)
    return _put_alone(log, layer, log.base(pointer).totals)


class _Replayed:
    """A shelf that goes through the versions, model in hand, when one of its layers asks for the values before it.

    Args:
        first: the version at which it begins to, one delta after the other whatever folds there are.
    """

    def __init__(self, log: DeltaLog, pointer: LatestPointer, first: int, base: Base, threads: int) -> None:
        self._log = log
        self._pointer = pointer
        self._first = first
        self._base = base
        self._shelf = Shelf(log, pointer, threads=threads)
        self._gone_through = False

    def layer(self, source: int, to: int) -> Layer:
        """As `Shelf.layer`; kept. Raises ConfigError, too, when a base is needed that was not given."""
        try:
            found = self._shelf.layer(source, to)
        except BaseNeeded:
            if self._gone_through:
                raise
            self._gone_through = True
            self._go_through()
            found = self._shelf.layer(source, to)
        self._shelf.add(found)
        return found

    def _go_through(self) -> None:
        with reconstructed(self._log, self._first, self._base) as (replica, _):
            for version in range(self._first + 1, self._pointer.version + 1):
                replica.go_to(self._pointer, version, keep=self._shelf.add)


def write_scheduled(
    log: DeltaLog,
    schedule: FoldSchedule,
    first: int | None = None,
    base: Base = None,
    *,
    threads: int = 1,
    progress: Progress = silent,
) -> list[Fold]:
    """Write those folds that a schedule wants and the catalog lacks, and the catalog with them; returns them.

    Args:
        first: the oldest version at which they may end; None: as far back as catalogs keep all folds.
        base: the checkpoint of version 0, as for `materialize`; used only where deltas are coded against the values
            before them.

    What cannot be composed from the log is left out and logged. Raises what reading and writing raise.
    """
    pointer = log.latest()
    catalog = log.catalog(pointer)
    begin = max(first if first is not None else pointer.version - NEAR, catalog.oldest, 1)
    wanted = schedule.missing(catalog, begin, pointer.version)
    oldest = min((source for source, _ in wanted), default=0)
    shelf = _Replayed(log, pointer, max(oldest, catalog.oldest), base, threads)
    made: list[Fold] = []
    totals = log.base(pointer).totals
    for number, (source, to) in enumerate(wanted):
        progress("folding", number, len(wanted))
        try:
            layer = shelf.layer(source, to)
        except (BaseNeeded, VersionGap, ConfigError) as error:
            logger.warning("no fold from version %d to %d: %s", source, to, error)
            continue
        made.append(_put_alone(log, layer, totals))
    progress("folding", len(wanted), len(wanted))
    if made:
        amend(log, lambda catalog, at: prune(with_folds(catalog, made), at.version, at.pin))
    return made
