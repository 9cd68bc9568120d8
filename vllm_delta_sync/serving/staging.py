"""Turns one step of the log into patches of live memory, and into its effect on the state hash.

Reads live memory, writes none. Runs in the background; correct only while no commit is under way, which the controller
guarantees: one step is staged at a time, and only a staged step is committed. Only elements that differ are staged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.errors import StagingLimit
from vllm_delta_sync.native import Seed
from vllm_delta_sync.native.types import U32, Bits
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.memory import LiveMemory, Patch, offsets_of, widen
from vllm_delta_sync.serving.messages import Lanes
from vllm_delta_sync.serving.tiles import TileReader
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.codecs import DecodedBlock, decode_block
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block


@dataclass(frozen=True)
class Effect:
    """What a step would do to this rank: patches, and the change of each touched region's lanes."""

    patches: tuple[Patch, ...]
    regions: tuple[int, ...]  # ascending
    lanes: Lanes  # uint32 [len(regions), 4]

    @property
    def elements(self) -> int:
        """Live elements that would be written."""
        return sum(patch.elements for patch in self.patches)


class Draft:
    """Collects what a step would do, region by region, into an `Effect`.

    Args:
        memory: where old values were read and new ones are to go.
        limit: bytes that the patches may take.
    """

    def __init__(self, memory: LiveMemory, limit: int) -> None:
        self._memory = memory
        self._limit = limit
        self._bytes = 0
        self._pieces: dict[int, _Pieces] = defaultdict(_Pieces)
        self._lanes: dict[int, Lanes] = {}

    def add(self, index: int, region: Region, dtype: str, offsets: U32, old: Bits, new: Bits, lanes: Lanes) -> None:
        """Elements at `offsets` of a region, or of a part of region `index`, go from `old` to `new`.

        Raises:
            StagingLimit: there are too many of them.
        """
        width, slot, base = self._memory.segment(region)
        self._bytes += len(offsets) * (offsets.itemsize + 2 * width)
        if self._bytes > self._limit:
            raise StagingLimit(
                f"the changes of this step take more than max_staged_bytes = {self._limit} bytes of memory, of which "
                f"{region.tensor!r} would go beyond; nothing was written: raise the limit, or serve a checkpoint that "
                "is nearer to what is published"
            )
        self._pieces[width].add(slot, base, offsets, widen(old, region, dtype), widen(new, region, dtype))
        self._lanes[index] = self._lanes.get(index, np.zeros(4, dtype=np.uint32)) + lanes

    def effect(self) -> Effect:
        touched = tuple(sorted(self._lanes))
        lanes = np.array([self._lanes[index] for index in touched], dtype=np.uint32).reshape(-1, 4)
        return Effect(tuple(self._pieces[width].patch(width) for width in sorted(self._pieces)), touched, lanes)


class _Pieces:
    """Collects the segments of one live width."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, int, int]] = []
        self.offsets: list[U32] = []
        self.expected: list[Bits] = []
        self.values: list[Bits] = []
        self.elements = 0

    def add(self, slot: int, base: int, offsets: U32, expected: Bits, values: Bits) -> None:
        end = self.elements + len(offsets)
        self.segments.append((slot, base, self.elements, end))
        self.elements = end
        self.offsets.append(offsets)
        self.expected.append(expected)
        self.values.append(values)

    def patch(self, width: int) -> Patch:
        return Patch(
            width,
            np.array(self.segments, dtype=np.int64).reshape(-1, 4),
            np.concatenate(self.offsets),
            np.concatenate(self.expected),
            np.concatenate(self.values),
        )


def stage(
    blocks: Iterable[tuple[Block, Buffer]],
    regions: Sequence[Region],
    regions_of: Mapping[str, Sequence[int]],
    seeds: Mapping[str, Seed],
    memory: LiveMemory,
    limit: int,
) -> Effect:
    """Decode verified blocks against live memory.

    Args:
        blocks: blocks with their verified bytes.
        regions: this rank's layout.
        regions_of: indices into `regions`, by tensor name; tensors not held here are absent.
        seeds: state hash seeds by tensor name.
        memory: where old values are read.
        limit: bytes that the patches may take.

    Raises:
        StagingLimit: they take more.
        BaseNeeded: a tile of a ctx block is held in part.
    """
    draft, tiles = Draft(memory, limit), TileReader(regions, memory)
    for block, payload in blocks:
        held = regions_of.get(block.spec.name, ())
        if not held:
            continue
        decoded = tiles.decode(block, payload, held) if block.codec == CTX else decode_block(block, payload)
        for index in held:
            _stage_region(block, decoded, index, regions[index], seeds[block.spec.name], memory, draft)
    return draft.effect()


def _stage_region(
    block: Block,
    decoded: DecodedBlock,
    index: int,
    region: Region,
    seed: Seed,
    memory: LiveMemory,
    draft: Draft,
) -> None:
    """The part of a block that lands in one region."""
    dtype = block.spec.dtype
    selected, targets = native.map_positions(
        decoded.positions, block.start, region.sizes, region.source_offset, region.source_strides, region.target_strides
    )
    if not len(selected):
        return
    offsets = offsets_of(region, targets)
    old = memory.read(region, dtype, offsets)
    whole = len(selected) == len(decoded.positions)
    positions = decoded.positions if whole else decoded.positions[selected]
    if decoded.steps is not None:
        new = native.apply_steps(old, decoded.steps if whole else decoded.steps[selected])
    else:
        assert decoded.values is not None
        new = decoded.values if whole else decoded.values[selected]
        differ = old != new  # a dense block lists every element, a fold also what came back to where it was
        if not differ.all():
            offsets, old, new, positions = offsets[differ], old[differ], new[differ], positions[differ]
            if not len(offsets):
                return
    draft.add(index, region, dtype, offsets, old, new, native.hash_changes(positions, block.start, old, new, seed))
