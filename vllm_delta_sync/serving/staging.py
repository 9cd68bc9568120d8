"""Turns one published version into patches of live memory, and into its effect on the state hash.

Reads live memory, writes none. Runs in the background; correct only while no commit is under way, which the controller
guarantees: one version is staged at a time, and only a staged version is committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.native import Seed
from vllm_delta_sync.native.types import U32, Bits
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.memory import LiveMemory, Patch, offsets_of, widen
from vllm_delta_sync.serving.messages import Lanes
from vllm_delta_sync.wire.codecs import DecodedBlock, decode_block
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block


@dataclass(frozen=True)
class Effect:
    """What a version would do to this rank: patches, and the change of each touched region's lanes."""

    patches: tuple[Patch, ...]
    regions: tuple[int, ...]  # ascending
    lanes: Lanes  # uint32 [len(regions), 4]


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
) -> Effect:
    """Decode verified blocks against live memory.

    Args:
        blocks: blocks with their verified bytes.
        regions: this rank's layout.
        regions_of: indices into `regions`, by tensor name; tensors not held here are absent.
        seeds: state hash seeds by tensor name.
        memory: where old values are read.
    """
    pieces: dict[int, _Pieces] = defaultdict(_Pieces)
    effects: dict[int, Lanes] = {}
    for block, payload in blocks:
        held = regions_of.get(block.spec.name, ())
        if not held:
            continue
        decoded = decode_block(block, payload)
        for index in held:
            effect = _stage_region(block, decoded, regions[index], seeds[block.spec.name], memory, pieces)
            if effect is not None:
                effects[index] = effects.get(index, np.zeros(4, dtype=np.uint32)) + effect
    touched = tuple(sorted(effects))
    lanes = np.array([effects[index] for index in touched], dtype=np.uint32).reshape(-1, 4)
    return Effect(tuple(pieces[width].patch(width) for width in sorted(pieces)), touched, lanes)


def _stage_region(
    block: Block, decoded: DecodedBlock, region: Region, seed: Seed, memory: LiveMemory, pieces: dict[int, _Pieces]
) -> Lanes | None:
    """The part of a block that lands in one region; None when nothing does."""
    dtype = block.spec.dtype
    selected, targets = native.map_positions(
        decoded.positions, block.start, region.sizes, region.source_offset, region.source_strides, region.target_strides
    )
    if not len(selected):
        return None
    offsets = offsets_of(region, targets)
    old = memory.read(region, dtype, offsets)
    whole = len(selected) == len(decoded.positions)
    if decoded.steps is not None:
        new = native.apply_steps(old, decoded.steps if whole else decoded.steps[selected])
    else:
        assert decoded.values is not None
        new = decoded.values if whole else decoded.values[selected]
    width, slot, base = memory.segment(region)
    pieces[width].add(slot, base, offsets, widen(old, region, dtype), widen(new, region, dtype))
    positions = decoded.positions if whole else decoded.positions[selected]
    return native.hash_changes(positions, block.start, old, new, seed)
