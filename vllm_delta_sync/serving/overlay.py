"""Turns a whole checkpoint into patches of live memory: what differs from what is served, region by region.

Reads live memory, writes none. Does not fetch: files come verified, one at a time. Memory is bounded by the changes and
one slab, not by the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native import Seed
from vllm_delta_sync.native.types import I64, Bits
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.memory import LiveMemory, offsets_of
from vllm_delta_sync.serving.staging import Draft, Effect
from vllm_delta_sync.wire import container, dtypes
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.tensors import TensorSpec

SLAB_ELEMENTS = 1 << 22


def overlay(
    files: Iterable[tuple[str, Buffer]],
    specs: Mapping[str, TensorSpec],
    regions: Sequence[Region],
    regions_of: Mapping[str, Sequence[int]],
    seeds: Mapping[str, Seed],
    memory: LiveMemory,
    limit: int,
) -> Effect:
    """What it takes to make live memory hold the tensors of a checkpoint.

    Args:
        files: the checkpoint's safetensors files, verified, with what to call each in an error.
        specs: the published tensors by name; others in the files are passed over.
        regions, regions_of, seeds, memory, limit: as in `staging.stage`.

    Raises:
        MalformedObject: a header is damaged, a tensor comes twice, or is not what version 0 lists.
        StagingLimit: too much differs.
    """
    room: Counter[int] = Counter()
    for region in regions:
        room[memory.segment(region)[0]] += region.numel
    draft, seen = Draft(memory, limit, room), set()

    def take(what: str, data: Buffer) -> None:
        for spec, bits in _tensors(data, what):
            if spec.name not in specs:
                continue
            if spec != specs[spec.name] or spec.name in seen:
                raise MalformedObject(
                    f"{what}: {spec.name!r} is {spec.dtype} {list(spec.shape)}, which comes twice in the checkpoint or "
                    "is not what version 0 of the run lists"
                )
            seen.add(spec.name)
            for index in regions_of.get(spec.name, ()):
                for slab in slabs(regions[index], SLAB_ELEMENTS):
                    _stage_slab(index, slab, spec.dtype, bits, seeds[spec.name], memory, draft)

    for what, data in files:
        take(what, data)
        del data  # before the next is fetched, so that only one takes room
    return draft.effect()


def slabs(region: Region, most: int) -> Iterator[Region]:
    """The region cut along its outer dims into parts of at most `most` elements, in the order of the checkpoint."""
    if region.numel <= most:
        yield region
        return
    size, inner = region.sizes[0], math.prod(region.sizes[1:])
    rows = max(1, most // inner)
    for first in range(0, size, rows):
        part = region.rows(first, rows)
        if inner > most:
            yield from slabs(part.first_row, most)
        else:
            yield part


def _tensors(data: Buffer, what: str) -> Iterator[tuple[TensorSpec, Bits]]:
    view = memoryview(data)
    header = container.parse_file(view, what, max_header=container.CHECKPOINT_HEADER_BYTES)
    for name, entry in header.entries.items():
        spec = TensorSpec(name, entry.dtype, entry.shape)
        bits = np.frombuffer(view[entry.start : entry.end], dtypes.by_name(spec.dtype).bits)
        yield spec, np.require(bits, requirements="A")  # a file may begin a tensor at any byte


def _stage_slab(index: int, slab: Region, dtype: str, bits: Bits, seed: Seed, memory: LiveMemory, draft: Draft) -> None:
    live = memory.elements(slab, dtype)
    strides = [step * bits.itemsize for step in slab.source_strides]
    wanted = as_strided(bits[slab.source_offset :], slab.sizes, strides, writeable=False).reshape(-1)
    where = np.flatnonzero(live != wanted)
    if not len(where):
        return
    positions = offsets_of(slab, _steps(where, slab.sizes, slab.source_strides))
    offsets = offsets_of(slab, _steps(where, slab.sizes, slab.target_strides))
    old, new = live[where], wanted[where]
    lanes = native.hash_changes(positions, slab.source_offset, old, new, seed)
    draft.add(index, slab, dtype, offsets, old, new, lanes)


def _steps(where: I64, sizes: Sequence[int], strides: Sequence[int]) -> I64:
    """Row-major indices into a box of these sizes as distances from its first element."""
    found = np.zeros(len(where), dtype=np.int64)
    if sizes:
        for index, stride in zip(np.unravel_index(where, sizes), strides, strict=True):
            found += index * stride
    return found
