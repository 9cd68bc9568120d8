"""Changing the catalog of a run from outside its publisher.

Does not decide what it should say.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_delta_sync.errors import Unavailable
from vllm_delta_sync.log import pointer as latest
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import LatestPointer

_ATTEMPTS = 5


def amend(log: DeltaLog, change: Callable[[Catalog, LatestPointer], Catalog]) -> Catalog:
    """Make what `change` makes of the catalog, and of what LATEST says, the run's catalog; returns it.

    `change` is asked again when somebody else wrote meanwhile. Where the store has no conditional writes, a publisher
    that wrote at the same moment may have put its own catalog back; that is seen, and done again.

    Raises Unavailable when others come before every time, and what reading and writing raise.
    """
    made: list[Catalog] = []

    def amended(current: LatestPointer) -> LatestPointer:
        made.append(change(log.catalog(current), current))
        ref = put_catalog(log.store, made[-1], current.sequence + 1)
        return current.model_copy(update={"catalog": ref})

    for _ in range(_ATTEMPTS):
        written = latest.update(log, amended)
        found = written if log.store.conditional else latest.look(log)
        if found.pointer.catalog == written.pointer.catalog:
            return made[-1]
    raise Unavailable(
        f"{log.store.uri}: the catalog was replaced {_ATTEMPTS} times right after it was written; try again"
    )
