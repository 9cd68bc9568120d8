"""The whole model at a version: from the base or an anchor, whichever is the cheaper beginning, by the quickest way.

Does not touch live weights, and does not write files: `export` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.errors import LogError, NotFound, StateError, VersionGap
from vllm_delta_sync.log.base import Base, Tensor, anchor_directory, base_bytes, base_directory
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.replica import Keep, Replica
from vllm_delta_sync.log.route import Route

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog
    from vllm_delta_sync.wire.hop import Hop
    from vllm_delta_sync.wire.manifest import LatestPointer

logger = logging.getLogger(__name__)

_ONE_BY_ONE = 8
"""Versions that who keeps deltas goes through last, one by one, though folds may lead over them: later folds begin at
those, or are composed of folds that end there, one at every seventh by default."""


def materialize(log: DeltaLog, version: int, base: Base = None, *, progress: Progress = silent) -> dict[str, Tensor]:
    """Every published tensor at a version, by name; tensors that never changed are views of where it began.

    Args:
        base: the checkpoint of version 0: a directory, its tensors (the bits are not written to), or None for the
            directory that version 0 names or the run's own anchors.

    Raises:
        BaseMismatch: the base lacks a tensor, or one differs from version 0; it is named.
        StateHashMismatch: a version does not come to the state hash it states.
        VersionGap: there is no such version, or no way to it any more.
        ConfigError: no base was given and the log offers none that can be read here.
    """
    with reconstructed(log, version, base, progress=progress) as (replica, _):
        return replica.tensors


@contextmanager
def reconstructed(
    log: DeltaLog, version: int, base: Base = None, *, progress: Progress = silent, keep: Keep | None = None
) -> Iterator[tuple[Replica, Path | Mapping[str, Tensor]]]:
    """A replica at a version, and the checkpoint that it began with; raises as `materialize` does.

    `keep`: is given the deltas on the way, as `Replica.apply` does, and those of the last few versions in any case.
    """
    pointer = log.latest()
    first = log.base(pointer)
    at = _beginning(log, pointer, base_bytes(first, base), version)
    if at is not None:
        with _from_anchor(log, pointer, at, version, progress, keep) as found:
            yield found
        return
    with base_directory(log, first, base) as found_base:
        begin = partial(Replica.at_base, log, pointer, found_base, progress)
        yield _reached(begin, pointer, version, progress, keep), found_base


@contextmanager
def reconstructed_without_base(log: DeltaLog, version: int, keep: Keep | None = None) -> Iterator[tuple[Replica, Path]]:
    """A replica at a version, by way of an anchor of the catalog, whatever is where the base should be, and its files.

    `keep`: as for `reconstructed`. Raises VersionGap when no anchor leads there, and else as `materialize` does.
    """
    pointer = log.latest()
    at = _beginning(log, pointer, None, version)
    if at is None:
        raise VersionGap(f"{log.store.uri}: no anchor leads to version {version}")
    with _from_anchor(log, pointer, at, version, silent, keep) as found:
        yield found


def _beginning(log: DeltaLog, pointer: LatestPointer, base_bytes: int | None, version: int) -> Hop | None:
    """The anchor to begin with, or None for the base, which costs so many bytes (None: is not to be had).

    Raises VersionGap when there is no such version, or no way to it.
    """
    if not 0 <= version <= pointer.version:
        raise VersionGap(f"{log.store.uri}: there is no version {version}; the log holds 0 to {pointer.version}")
    if base_bytes is None and not log.catalog(pointer).anchors:
        return None
    return Route(log).start(pointer, base_bytes, version)


@contextmanager
def _from_anchor(
    log: DeltaLog, pointer: LatestPointer, at: Hop, version: int, progress: Progress, keep: Keep | None
) -> Iterator[tuple[Replica, Path]]:
    assert at.checkpoint is not None, "a beginning is an anchor"
    with anchor_directory(log, at.checkpoint) as directory:
        begin = partial(Replica.at_anchor, log, at, directory, progress)
        yield _reached(begin, pointer, version, progress, keep), directory


def _reached(
    begin: Callable[[], Replica], pointer: LatestPointer, version: int, progress: Progress, keep: Keep | None
) -> Replica:
    """A replica that has gone to a version from where `begin` puts it."""
    replica = begin()
    if keep is not None:
        try:
            for stop in range(max(replica.version + 1, version - _ONE_BY_ONE), version + 1):
                replica.go_to(pointer, stop, progress, keep)
            return replica
        except (LogError, StateError, NotFound) as error:  # what is damaged or gone may lie beneath a fold
            logger.info("going by folds, as not all of the newest deltas are there: %s", error)
            replica = begin()
    replica.go_to(pointer, version, progress, keep)
    return replica
