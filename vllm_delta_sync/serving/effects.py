"""What a step would do to one rank, and every tensor's hash after it: from blocks, or from the files of an anchor.

Fetches and verifies; writes nothing, and does not judge whether the step may be taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.native import Seed
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.memory import LiveMemory
from vllm_delta_sync.serving.messages import Lanes
from vllm_delta_sync.serving.overlay import overlay
from vllm_delta_sync.serving.staging import Effect, stage
from vllm_delta_sync.serving.stopwatch import Stopwatch
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import AnchorRef
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec


@dataclass(frozen=True)
class Ground:
    """What steps are measured against: a run's tensors, where this rank keeps them, and how much may change at once."""

    log: DeltaLog
    base: VersionTable  # of version 0
    specs: Mapping[str, TensorSpec]  # its tensors, by name
    seeds: Mapping[str, Seed]  # by tensor name
    regions: Sequence[Region]
    regions_of: Mapping[str, Sequence[int]]  # indices into `regions`, by tensor name
    memory: LiveMemory
    limit: int  # bytes that the changes may take


def of_blocks(hop: Hop, ground: Ground, fetcher: Fetcher, before: Lanes, clock: Stopwatch) -> tuple[Effect, Lanes]:
    """A delta or a fold; `before` and the result are uint32 [tensors, 4]. Raises what fetching and `stage` raise."""
    table = clock.time(lambda: fetcher.table(hop))
    table.require_known(ground.specs, f"the {hop.kind} to version {hop.to}")
    blocks = clock.over(fetcher.blocks(hop, table))
    effect = stage(table.blocks, blocks, ground.regions, ground.regions_of, ground.seeds, ground.memory, ground.limit)
    index = {spec.name: i for i, spec in enumerate(ground.base.tensors)}
    hashes = before.copy()
    hashes[[index[spec.name] for spec in table.tensors]] = table.hashes
    return effect, hashes


def of_anchor(
    hop: Hop, checkpoint: AnchorRef, ground: Ground, fetcher: Fetcher, clock: Stopwatch
) -> tuple[Effect, Lanes]:
    """An anchor, whose hashes are uint32 [tensors, 4]. Raises what fetching and `overlay` raise."""
    log, hashes = ground.log, ground.base.hashes
    if (ref := hop.states) is not None:
        table = clock.time(lambda: fetcher.states(ref, hop.after))
        if table.tensors != ground.base.tensors:
            raise MalformedObject(f"{log.store.uri}/{ref.key}: lists other tensors than version 0 of the run")
        hashes = table.hashes
    files = clock.over(_files(checkpoint, log.store.uri, fetcher))
    effect = overlay(files, ground.specs, ground.regions, ground.regions_of, ground.seeds, ground.memory, ground.limit)
    return effect, hashes


def _files(checkpoint: AnchorRef, where: str, fetcher: Fetcher) -> Iterator[tuple[str, Buffer]]:
    for file in checkpoint.files:
        if file.key.endswith(".safetensors"):
            yield f"{where}/{file.key}", fetcher.object(file)
