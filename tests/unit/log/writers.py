"""Writers of a tiny log, each with a store of its own, and the least that they do.

Holds no assertions.
"""

from __future__ import annotations

from collections.abc import Callable

import tiny_log
from hooked_store import HookedStore

from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest

Change = Callable[[LatestPointer], LatestPointer]


def writer_on(tiny: tiny_log.TinyLog, *, conditional: bool) -> tuple[LogWriter, HookedStore]:
    store = HookedStore(tiny.log.store, conditional=conditional)
    return LogWriter.attach(DeltaLog(store, tiny.log.run)), store


def idle(writer: LogWriter) -> Manifest:
    """Commit a version in which nothing changes."""
    return writer.commit([], state_root=writer.tip.state_root)


def with_pin(version: int | None) -> Change:
    return lambda found: found.model_copy(update={"pin": version})
