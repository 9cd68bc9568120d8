"""Turns one step of the log into patches of live memory, and into its effect on the state hash.

Reads live memory, writes none. Runs in the background; correct only while no commit is under way, which the controller
guarantees: one step is staged at a time, and only a staged step is committed. Only elements that differ are staged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.errors import StagingLimit
from vllm_delta_sync.kernels import Prepared
from vllm_delta_sync.native import Seed
from vllm_delta_sync.native.types import U32, WIDTHS, Bits
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.device_tiles import DeviceTiles
from vllm_delta_sync.serving.memory import LiveMemory, Patch, offsets_of, widen
from vllm_delta_sync.serving.messages import Lanes
from vllm_delta_sync.serving.tiles import TileReader
from vllm_delta_sync.wire.codec_rules import CTX, DENSE
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.encoded import DecodedBlock
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block

AT_ONCE = 1 << 17  # changes of a block that are mapped, read and hashed at a time


@dataclass(frozen=True)
class Effect:
    """What a step would do to this rank: patches, and the change of each touched region's lanes."""

    patches: tuple[Prepared, ...]
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
        room: how many elements of each live width may come at most.
    """

    def __init__(self, memory: LiveMemory, limit: int, room: Mapping[int, int]) -> None:
        self._memory = memory
        self._limit = limit
        self._bytes = 0
        self._columns = {width: _Columns(width, min(most, limit // _cost(width))) for width, most in room.items()}
        self._lanes: dict[int, Lanes] = {}

    def add(self, index: int, region: Region, dtype: str, offsets: U32, old: Bits, new: Bits, lanes: Lanes) -> None:
        """Elements at `offsets` of a region, or of a part of region `index`, go from `old` to `new`.

        Raises:
            StagingLimit: there are too many of them.
        """
        width, slot, base = self._memory.segment(region)
        self._bytes += len(offsets) * _cost(width)
        if self._bytes > self._limit:
            raise StagingLimit(
                f"the changes of this step take more than max_staged_bytes = {self._limit} bytes of memory, of which "
                f"{region.tensor!r} would go beyond; nothing was written: raise the limit, or serve a checkpoint that "
                "is nearer to what is published"
            )
        self._columns[width].add(slot, base, offsets, widen(old, region, dtype), widen(new, region, dtype))
        self._lanes[index] = self._lanes.get(index, np.zeros(4, dtype=np.uint32)) + lanes

    def effect(self) -> Effect:
        touched = tuple(sorted(self._lanes))
        lanes = np.array([self._lanes[index] for index in touched], dtype=np.uint32).reshape(-1, 4)
        filled = {width: columns.patch() for width, columns in sorted(self._columns.items()) if columns.elements}
        return Effect(self._memory.prepare(filled), touched, lanes)


class _Columns:
    """The changes to live elements of one width, in the memory that they stay in: a join would hold them twice.

    Room is set aside for all that may come; the system gives memory to what is written only.
    """

    def __init__(self, width: int, most: int) -> None:
        self._segments: list[tuple[int, int, int, int]] = []
        self._offsets = np.empty(most, np.uint32)
        self._expected, self._values = np.empty(most, WIDTHS[width]), np.empty(most, WIDTHS[width])
        self.elements = 0

    def add(self, slot: int, base: int, offsets: U32, expected: Bits, values: Bits) -> None:
        start, self.elements = self.elements, self.elements + len(offsets)
        assert self.elements <= len(self._offsets), f"{self.elements} changes where {len(self._offsets)} may come"
        goes_on = bool(self._segments) and self._segments[-1][:2] == (slot, base)
        first = self._segments.pop()[2] if goes_on else start
        self._segments.append((slot, base, first, self.elements))
        part = slice(start, self.elements)
        self._offsets[part], self._expected[part], self._values[part] = offsets, expected, values

    def patch(self) -> Patch:
        filled = slice(self.elements)
        segments = np.array(self._segments, dtype=np.int64).reshape(-1, 4)
        return Patch(segments, self._offsets[filled], self._expected[filled], self._values[filled])


def _cost(width: int) -> int:
    """Bytes that a change of a live element takes: its offset, and both values."""
    return 4 + 2 * width


def room_for(
    rows: Iterable[Block], regions: Sequence[Region], regions_of: Mapping[str, Sequence[int]], memory: LiveMemory
) -> Counter[int]:
    """How many live elements of each width the blocks of these rows can change at most."""
    room: Counter[int] = Counter()
    for row in rows:
        listed = row.count if row.codec == DENSE else row.changed
        for index in regions_of.get(row.spec.name, ()):
            width, _, _ = memory.segment(regions[index])
            room[width] += min(listed, regions[index].numel)
    return room


def stage(
    rows: Iterable[Block],
    blocks: Iterable[tuple[Block, Buffer]],
    regions: Sequence[Region],
    regions_of: Mapping[str, Sequence[int]],
    seeds: Mapping[str, Seed],
    memory: LiveMemory,
    limit: int,
) -> Effect:
    """Decode verified blocks against live memory.

    Args:
        rows: all blocks of the step, as its table lists them.
        blocks: those that this rank needs, with their verified bytes.
        regions: this rank's layout.
        regions_of: indices into `regions`, by tensor name; tensors not held here are absent.
        seeds: state hash seeds by tensor name.
        memory: where old values are read.
        limit: bytes that the patches may take.

    Raises:
        StagingLimit: they take more.
        BaseNeeded: a tile of a ctx block is held in part.
    """
    draft = Draft(memory, limit, room_for(rows, regions, regions_of, memory))
    for block, decoded in _decoded(blocks, regions, regions_of, memory):
        for part in _parts(decoded):
            for index in regions_of[block.spec.name]:
                _stage_region(block, part, index, regions[index], seeds[block.spec.name], memory, draft)
    return draft.effect()


def _decoded(
    blocks: Iterable[tuple[Block, Buffer]],
    regions: Sequence[Region],
    regions_of: Mapping[str, Sequence[int]],
    memory: LiveMemory,
) -> Iterator[tuple[Block, DecodedBlock]]:
    """The changes of the blocks that this rank holds something of; ctx blocks of a device come together, and later."""
    tiles = TileReader(regions, memory)
    device = None if memory.decode_tiles is None else DeviceTiles(memory.decode_tiles, regions, memory)
    for block, payload in blocks:
        held = regions_of.get(block.spec.name, ())
        if not held:
            continue
        if block.codec != CTX:
            yield block, decode_block(block, payload)
        elif device is None or not device.take(block, payload, held):
            yield block, tiles.decode(block, payload, held)
        elif device.full:
            yield from device.flush()
    if device is not None:
        yield from device.flush()


def _parts(decoded: DecodedBlock) -> Iterator[DecodedBlock]:
    """The changes of a block, some at a time: what is made of them on the way takes more memory than they do."""
    for first in range(0, len(decoded.positions), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        steps, values = (None if column is None else column[some] for column in (decoded.steps, decoded.values))
        yield replace(decoded, positions=decoded.positions[some], steps=steps, values=values)


def _stage_region(
    block: Block,
    decoded: DecodedBlock,
    index: int,
    region: Region,
    seed: Seed,
    memory: LiveMemory,
    draft: Draft,
) -> None:
    """What of these changes of a block lands in one region."""
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
