"""Which region of which rank is canonical for the elements of a checkpoint tensor, which are copies, what nobody holds.

Looks at source geometry only; knows neither torch nor vLLM, and touches no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import UnsupportedLayout
from vllm_delta_sync.serving.affine import Box, Region, first_overlap
from vllm_delta_sync.wire.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Group:
    """The regions, over all ranks, that hold the very same elements of one tensor. The first member is canonical."""

    tensor: str
    members: tuple[tuple[int, int], ...]  # (rank, index into that rank's regions), ascending


@dataclass(frozen=True, slots=True)
class Coverage:
    """Who holds what. The groups of a tensor are disjoint, and together hold each of its elements once."""

    groups: tuple[Group, ...]  # in the order of the specs, then of the elements
    unmapped: tuple[str, ...]  # tensors that have elements, none of which is held by any rank


def cover(ranks: Sequence[Sequence[Region]], specs: Sequence[TensorSpec]) -> Coverage:
    """Group the regions of all ranks by the elements they hold, and prove that they hold every element of each tensor.

    Args:
        ranks: the regions of rank 0, 1, …; their order is the order of the indices in `Group.members`.
        specs: every tensor of the checkpoint.

    Raises:
        UnsupportedLayout: regions of a tensor overlap without being equal, leave a part of it out, reach beyond it, or
            name a tensor that the checkpoint does not have.
    """
    shapes = {spec.name: spec for spec in specs}
    held: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, regions in enumerate(ranks):
        for index, region in enumerate(regions):
            held.setdefault(region.tensor, {}).setdefault(region.source, []).append((rank, index))
    strangers = sorted(held.keys() - shapes.keys())
    if strangers:
        raise UnsupportedLayout(f"the model loads {strangers[0]!r}, which is not a tensor of the checkpoint")
    groups: list[Group] = []
    unmapped: list[str] = []
    for spec in specs:
        boxes = held.get(spec.name)
        if boxes is None:
            if spec.numel:
                unmapped.append(spec.name)
            continue
        _require_exact_cover(spec, boxes)
        ordered = sorted(boxes.items(), key=lambda item: item[0].offset)
        groups.extend(Group(spec.name, tuple(members)) for _, members in ordered)
    return Coverage(tuple(groups), tuple(unmapped))


def _require_exact_cover(spec: TensorSpec, boxes: Mapping[Box, list[tuple[int, int]]]) -> None:
    """Disjoint, inside the tensor and as many elements as the tensor: that is each element once."""
    for box, members in boxes.items():
        if box.offset < 0 or box.end > spec.numel:
            raise UnsupportedLayout(
                f"{spec.name}: rank {members[0][0]} loads elements up to {box.end - 1} of a tensor of {spec.numel}"
            )
    geometries = list(boxes)
    clash = first_overlap(geometries)
    if clash is not None:
        one, other = (boxes[geometries[i]][0] for i in clash)
        raise UnsupportedLayout(
            f"{spec.name}: rank {one[0]} (region {one[1]}) and rank {other[0]} (region {other[1]}) hold parts that "
            "overlap without being the same; its elements cannot be attributed"
        )
    total = sum(box.numel for box in geometries)
    if total != spec.numel:
        raise UnsupportedLayout(
            f"{spec.name}: the ranks hold {total} of its {spec.numel} elements; a change of the others would be lost"
        )
