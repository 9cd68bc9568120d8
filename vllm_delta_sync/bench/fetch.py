"""How many bytes two nodes that serve one model between them fetch of one update, beside what they hold of it.

Does not measure time, and does not load the model: each node is what its ranks would say they need.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_sync import native
from vllm_delta_sync.log import LogWriter, TensorUpdate
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs, Ranges
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.codecs import encode_block
from vllm_delta_sync.wire.manifest import BaseRef, Manifest
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks

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
    before, after = open_checkpoint(old), open_checkpoint(new)
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
        lanes = {spec: state_hash.of_tensor(spec, bits) for spec, bits in before.values()}
        writer = LogWriter.create(bucket, lanes, base=BaseRef(model=str(old)))
        updates = list(_updates(before, after))
        lanes |= {update.spec: update.lanes for update in updates}
        manifest = writer.commit(updates, state_root=state_hash.state_root(lanes))
        return [
            _fetch(writer, manifest, specs, name, node, held) for name, held in layouts.items() for node in range(NODES)
        ]


def _fetch(
    writer: LogWriter, manifest: Manifest, specs: list[TensorSpec], layout: str, node: int, held: _Held
) -> NodeFetch:
    needs = Needs({spec.name: held(spec, node) for spec in specs}, sum(spec.numel for spec in specs))
    fetcher = Fetcher(writer.log.store, None, needs)
    for _ in fetcher.blocks(manifest, fetcher.table(manifest)):
        pass
    return NodeFetch(layout, node, fetcher.fetched_bytes, fetcher.needed_bytes, manifest.totals.bytes)


def _rows(spec: TensorSpec, node: int) -> Ranges:
    """Half the rows of a matrix; a vector is held by both."""
    if len(spec.shape) < 2:
        return ((0, spec.numel),)
    row = spec.numel // spec.shape[0]
    first, last = (spec.shape[0] * part // NODES for part in (node, node + 1))
    return ((first * row, last * row),)


def _updates(
    before: Mapping[str, tuple[TensorSpec, Bits]], after: Mapping[str, tuple[TensorSpec, Bits]]
) -> Iterator[TensorUpdate]:
    for name, (spec, bits) in after.items():
        blocks = []
        for start, count in split_blocks(spec):
            part = slice(start, start + count)
            changes = native.diff(before[name][1][part].copy(), bits[part], advance=False)
            if len(changes.positions):
                blocks.append((start, count, encode_block(spec, changes, start, count, bits[part])))
        if blocks:
            yield TensorUpdate(spec, state_hash.of_tensor(spec, bits), blocks)
