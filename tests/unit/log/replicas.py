"""A log of six versions with folds and an anchor, and what a replica of a tiny log must be.

Holds the few assertions that every replica has to keep.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny_folds
import tiny_log

from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire import state_hash

LENGTH = 6


def build_long(directory: Path) -> tiny_log.TinyLog:
    """Six versions with the folds 0→4, 2→4 and 6→3 and an anchor at 4."""
    tiny = tiny_log.build(directory, LENGTH)
    for source, to in ((0, 4), (2, 4), (6, 3)):
        tiny_folds.add_fold(tiny, source, to)
    tiny_folds.add_anchor(tiny, 4)
    return tiny


def assert_at(replica: Replica, tiny: tiny_log.TinyLog, version: int) -> None:
    """It is at a version of the log, in every respect."""
    assert replica.version == version
    assert replica.held.sha256 == tiny_folds.reference(tiny, version).sha256
    model = tiny.models[version]
    assert replica.root == state_hash.state_root(tiny_log.lanes_of(model))
    assert tiny_log.same(replica.tensors, model)
    for spec, bits in model.values():
        np.testing.assert_array_equal(replica.lanes[spec], state_hash.of_tensor(spec, bits))


def pinned(tiny: tiny_log.TinyLog, version: int) -> tiny_log.TinyLog:
    """The same log, whose LATEST has a pin now."""
    pointer = tiny.log.latest()
    tiny.say(pointer.model_copy(update={"pin": version, "sequence": pointer.sequence + 1}))
    return tiny


def hops(tiny: tiny_log.TinyLog, start: int, goal: int) -> list[tuple[str, int]]:
    """The way a follower takes, hop by hop."""
    log = tiny.log
    route, pointer, held, at, found = Route(log), log.latest(), tiny_folds.reference(tiny, start), start, []
    while (hop := route.next_hop(pointer, held, at, goal)) is not None:
        held, at = hop.target, hop.to
        found.append((hop.kind, hop.to))
    return found
