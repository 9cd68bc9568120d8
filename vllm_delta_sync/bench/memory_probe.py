"""The processes whose memory is measured: one publishes an update, one takes it. Prints one JSON object.

Arguments: `publish BUCKET OLD NEW ctx|gap` or `stage BUCKET OLD`. Does not start itself: `memory.py` starts both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync import Publisher, kernels
from vllm_delta_sync.bench import resident
from vllm_delta_sync.bench.memory import PublishMemory, StageMemory
from vllm_delta_sync.bench.peers import Tensors, as_tensors
from vllm_delta_sync.bench.step import in_memory
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.serving.locate import locate
from vllm_delta_sync.serving.proof import Proof
from vllm_delta_sync.serving.rank import Rank
from vllm_delta_sync.wire.checkpoint import open_checkpoint, write_checkpoint
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.tensors import TensorSpec

_SMALL = TensorSpec("small", "BF16", (1 << 12,))


def publish(bucket: str, old: Path, new: Path, coding: str) -> PublishMemory:
    """Hold the model, open a publisher on its checkpoint, move on to the new weights, and publish them."""
    model = _loaded(old)
    alone = resident.reset_peak()
    publisher = Publisher.open(bucket, base=old, ctx=coding == "ctx")
    open_peak = resident.peak()
    held = resident.held() - alone
    for name, item in open_checkpoint(new).items():
        model[name].copy_(as_tensors(in_memory({name: item}))[name])
    before = resident.reset_peak()
    publication = publisher.publish(model)
    publisher.close()
    peak = resident.peak() - before
    return PublishMemory(
        parameters=publication.elements,
        changed=publication.changed,
        model_bytes=sum(tensor.nbytes for tensor in model.values()),
        open_peak_bytes=open_peak - alone,
        held_bytes=held,
        publish_peak_bytes=peak,
        held_bytes_per_parameter=held / publication.elements,
        publish_peak_bytes_per_change=peak / publication.changed,
    )


class Served(torch.nn.Module):
    """The tensors of a checkpoint as they are, with a loader such as vLLM's models have."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._own = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        for name, parameter in self._own.items():
            self.register_parameter(name.replace(".", "/"), parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each into its place."""
        for name, tensor in weights:
            self._own[name].data.copy_(tensor)


def stage(bucket: str, old: Path) -> StageMemory:
    """Hold live weights, join them to the log, take its one update by way of a node's cache, and commit it."""
    model = Served(_loaded(old))
    log = DeltaLog.open(bucket)
    pointer, tip = log.latest(), log.tip()
    cache = NodeCache(Path(bucket) / "cache", 1 << 40)
    rank = Rank(0, lambda device: kernels.select("auto", device), 1 << 40, cache)
    rank.load_base(log, pointer.base)
    layout = rank.trace(model)
    assert rank.base is not None
    proof = Proof.of_layouts([layout], rank.base.tensors, ignore_unmapped=False)
    located = locate(log, pointer, rank.base, proof.sum({0: rank.prove().lanes}), proof.skipped)
    rank.join(located.place, located.lanes)
    before = resident.reset_peak()
    rank.stage(Hop.over(tip, pointer.manifest))
    changed = rank.commit(tip.version)
    peak, held = resident.peak() - before, resident.held() - before
    return StageMemory(
        changed=changed,
        held_bytes=held,
        peak_bytes=peak,
        held_bytes_per_change=held / changed,
        peak_bytes_per_change=peak / changed,
    )


def _loaded(checkpoint: Path) -> Tensors:
    """The checkpoint in memory of this process's own."""
    return as_tensors(in_memory(open_checkpoint(checkpoint)))


def warm_up(folder: Path) -> None:
    """Publish and take an update of a small model, so that nothing is imported or set up while memory is measured."""
    bucket, old, new = (folder / name for name in ("bucket", "old", "new"))
    for side, value in ((old, 0), (new, 1)):
        write_checkpoint(side, [(_SMALL, np.full(_SMALL.numel, value, np.uint16))])
    publish(str(bucket), old, new, "ctx")
    stage(str(bucket), old)


def main() -> None:
    kind, bucket, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder))
    if kind == "publish":
        old, new, coding = rest
        found: PublishMemory | StageMemory = publish(bucket, Path(old), Path(new), coding)
    else:
        found = stage(bucket, Path(rest[0]))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
