"""Finds the version whose tensors have given hashes: how a server with any checkpoint of a run finds its place in it.

Says what differs when there is none; which versions there are is `log.states`'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.log import DeltaLog, states
from vllm_delta_sync.serving.messages import Lanes, Located, Place
from vllm_delta_sync.wire.manifest import LatestPointer
from vllm_delta_sync.wire.table import VersionTable


def locate(log: DeltaLog, pointer: LatestPointer, base: VersionTable, lanes: Lanes, skip: Sequence[int]) -> Located:
    """A version of the run whose hashes equal `lanes`, uint32 [tensors, 4].

    Args:
        base: the table of version 0, which gives the tensors' order.
        skip: tensors that no rank holds.
    """
    judged = np.ones(len(base.tensors), dtype=bool)
    judged[list(skip)] = False
    found = states.locate(log, pointer, base, lanes, judged)
    if found is None:
        return Located(None, lanes, _difference(base, lanes, judged, pointer.version))
    return Located(Place(found.version, found.ref, found.root), found.lanes, "")


def _difference(base: VersionTable, lanes: Lanes, judged: npt.NDArray[np.bool_], tip: int) -> str:
    wrong = np.flatnonzero((base.hashes != lanes).any(axis=1) & judged)
    spec = base.tensors[int(wrong[0])]
    looked_at = (
        f" (of {tip} versions, the newest {states.NEWEST} were looked at, and anchors)" if tip > states.NEWEST else ""
    )
    return (
        f"the served weights are those of no version of this run: {len(wrong)} of {int(judged.sum())} tensors differ "
        f"from its base, first {spec.name!r} ({spec.dtype} {list(spec.shape)}); serve the checkpoint that the trainer "
        f"started from{looked_at}"
    )
