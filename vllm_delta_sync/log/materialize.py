"""The whole model at a version: from the base or an anchor, whichever is the cheaper beginning, by the cheapest way.

Does not touch live weights, and does not write files: `export` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.log.base import Base, Tensor, anchor_directory, base_bytes, base_directory
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog


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
    log: DeltaLog, version: int, base: Base = None, *, progress: Progress = silent
) -> Iterator[tuple[Replica, Path | Mapping[str, Tensor]]]:
    """A replica at a version, and the checkpoint that it began with; raises as `materialize` does."""
    pointer = log.latest()
    if not 0 <= version <= pointer.version:
        raise VersionGap(f"{log.store.uri}: there is no version {version}; the log holds 0 to {pointer.version}")
    first = log.base(pointer)
    cost = base_bytes(first, base)
    at = None
    if cost is not None or log.catalog(pointer).anchors:
        at = Route(log).start(pointer, cost, version)
    if at is not None:
        assert at.checkpoint is not None, "a beginning is an anchor"
        with anchor_directory(log, at.checkpoint) as directory:
            replica = Replica.at_anchor(log, at, directory, progress)
            replica.go_to(pointer, version, progress)
            yield replica, directory
        return
    with base_directory(log, first, base) as found:
        replica = Replica.at_base(log, pointer, found, progress)
        replica.go_to(pointer, version, progress)
        yield replica, found
