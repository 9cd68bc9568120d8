"""How many bytes two nodes that serve one model between them fetch of one update, beside what they hold of it.

Does not measure time, and does not load the model: each node is what its ranks would say they need.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_sync.bench.codings import write_log
from vllm_delta_sync.bench.step import read
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs, Ranges
from vllm_delta_sync.wire.tensors import TensorSpec

NODES = 2
_Held = Callable[[TensorSpec, int], Ranges]  # (tensor, node) → the elements that the node holds, and those between

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_COLUMNS = re.compile(r"\b(o_proj|down_proj)\.weight$")  # what vLLM splits along dim 1


@dataclass(frozen=True)
class NodeFetch:
    """What one node fetched of one update, in bytes."""

    layout: str
    node: int
    fetched: int
    needed: int  # the table and the stored blocks of which it holds an element
    update: int  # all shards


def measure(old: Path, new: Path) -> list[NodeFetch]:
    """Publish the step from one checkpoint to the other into a temporary log, and fetch it for every node."""
    before, after = read(old, new)
    specs = [spec for spec, _ in after.values()]
    layers = 1 + max((int(found[1]) for spec in specs if (found := _LAYER.search(spec.name))), default=0)

    def stage(spec: TensorSpec, node: int) -> Ranges:
        found = _LAYER.search(spec.name)
        mine = found is None or int(found[1]) * NODES // layers == node
        return ((0, spec.numel),) if mine else ()

    layouts: dict[str, _Held] = {
        "pipeline": stage,
        "rows": _rows,
        "rows and columns": lambda spec, node: ((0, spec.numel),) if _COLUMNS.search(spec.name) else _rows(spec, node),
    }
    with tempfile.TemporaryDirectory() as bucket:
        log = write_log(bucket, old, [before, after]).log
        return [_fetch(log, specs, name, node, held) for name, held in layouts.items() for node in range(NODES)]


def _fetch(log: DeltaLog, specs: list[TensorSpec], layout: str, node: int, held: _Held) -> NodeFetch:
    needs = Needs({spec.name: held(spec, node) for spec in specs}, sum(spec.numel for spec in specs))
    fetcher, tip = Fetcher(log.store, None, needs), log.tip()
    for _ in fetcher.blocks(tip, fetcher.table(tip)):
        pass
    return NodeFetch(layout, node, fetcher.fetched_bytes, fetcher.needed_bytes, tip.totals.bytes)


def _rows(spec: TensorSpec, node: int) -> Ranges:
    """Half the rows of a matrix; a vector is held by both."""
    if len(spec.shape) < 2:
        return ((0, spec.numel),)
    row = spec.numel // spec.shape[0]
    first, last = (spec.shape[0] * part // NODES for part in (node, node + 1))
    return ((first * row, last * row),)
