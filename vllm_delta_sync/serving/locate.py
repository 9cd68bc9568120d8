"""Finds the version whose tensors have given hashes: how a server with any checkpoint of a run finds its place in it.

Reads tables only, oldest first, and no further than it must; never a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.serving.messages import Lanes, Located, Ref
from vllm_delta_sync.wire.table import VersionTable


def locate(log: DeltaLog, base: VersionTable, refs: Sequence[Ref], lanes: Lanes, skip: Sequence[int]) -> Located:
    """The first version of `refs` (0 … tip, ascending) whose hashes equal `lanes`, uint32 [tensors, 4].

    Args:
        base: the table of version 0, which gives the tensors' order.
        skip: tensors that no rank holds.
    """
    judged = np.ones(len(base.tensors), dtype=bool)
    judged[list(skip)] = False
    index = {spec: i for i, spec in enumerate(base.tensors)}
    hashes = base.hashes.copy()
    for ref in refs:
        if ref.version:
            table = log.table(log.manifest(ref.to_object()))
            hashes[[index[spec] for spec in table.tensors]] = table.hashes
        if (hashes[judged] == lanes[judged]).all():
            return Located(ref.version, "")
    return Located(None, _difference(base, lanes, judged))


def _difference(base: VersionTable, lanes: Lanes, judged: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> str:
    wrong = np.flatnonzero((base.hashes != lanes).any(axis=1) & judged)
    spec = base.tensors[int(wrong[0])]
    return (
        f"the served weights are those of no version of this run: {len(wrong)} of {int(judged.sum())} "
        "tensors differ from its base, "
        f"first {spec.name!r} ({spec.dtype} {list(spec.shape)}); serve the checkpoint that the trainer started from"
    )
