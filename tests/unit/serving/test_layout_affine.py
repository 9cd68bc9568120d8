"""Regions against brute force: every element that torch would copy is where the region says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.errors import UnsupportedLayout
from vllm_delta_sync.serving.affine import Box, Region, View, compose, first_overlap, runs


def view_of(tensor: torch.Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def pairs(region: Region) -> set[tuple[int, int]]:
    """(checkpoint position, live position) of each element of a region."""
    found = set()
    for index in itertools.product(*(range(n) for n in region.sizes)):
        source = region.source_offset + sum(i * s for i, s in zip(index, region.source_strides, strict=True))
        target = region.target_offset + sum(i * s for i, s in zip(index, region.target_strides, strict=True))
        found.add((source, target))
    return found


@st.composite
def loader_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of a checkpoint tensor (values: their positions) and the live view that it is copied to."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    source = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from(["narrow", "transpose", "reshape", "chunk", "unsqueeze", "stride"]))
        dim = draw(st.integers(0, max(source.dim() - 1, 0)))
        if step == "narrow" and source.dim():
            start = draw(st.integers(0, source.shape[dim] - 1))
            source = source.narrow(dim, start, draw(st.integers(1, source.shape[dim] - start)))
        elif step == "chunk" and source.dim():
            parts = source.chunk(draw(st.integers(1, 3)), dim)
            source = parts[draw(st.integers(0, len(parts) - 1))]
        elif step == "transpose" and source.dim() > 1:
            source = source.transpose(dim, draw(st.integers(0, source.dim() - 1)))
        elif step == "stride" and source.dim() and source.shape[0] % 2 == 0:
            source = source[::2]
        elif step == "unsqueeze":
            source = source.unsqueeze(dim)
        elif step == "reshape" and source.is_contiguous():
            source = source.flatten()
    order = draw(st.permutations(range(source.dim())))
    padding = [draw(st.integers(0, 2)) for _ in range(source.dim())]
    live = torch.full([source.shape[d] + padding[d] for d in order], -1, dtype=torch.int64)
    for d, dim in enumerate(order):
        live = live.narrow(d, draw(st.integers(0, padding[dim])), source.shape[dim])
    return source, live.permute([order.index(d) for d in range(source.dim())])


@given(loader_views())
def test_a_region_maps_each_element_to_where_torch_copies_it(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = views
    region = compose("w", view_of(source), view_of(target), 0, "BF16")
    target.copy_(source)
    flat = torch.empty(0, dtype=torch.int64).set_(target.untyped_storage())
    expected = {(int(value), position) for position, value in enumerate(flat.tolist()) if value >= 0}
    assert pairs(region) == expected
    assert region.numel == source.numel()


def test_every_second_column_of_rows_of_odd_length_is_refused_by_name() -> None:
    source, target = torch.arange(6).view(2, 3)[:, ::2], torch.zeros(2, 2)
    with pytest.raises(UnsupportedLayout, match="the elements read by the loader are not a plain view"):
        compose("w", view_of(source), view_of(target), 0, "BF16")


@given(loader_views())
def test_a_region_is_canonical(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = views
    region = compose("w", view_of(source), view_of(target), 0, "BF16")
    assert 1 not in region.sizes
    dims = list(zip(region.sizes, region.source_strides, region.target_strides, strict=True))
    for (_, outer, outer_target), (size, inner, inner_target) in itertools.pairwise(dims):
        assert outer >= inner * size
        assert (outer, outer_target) != (inner * size, inner_target * size), "these two dims could have been one"
    if source.dim() > 1:
        shuffled = compose("w", view_of(source.transpose(0, -1)), view_of(target.transpose(0, -1)), 0, "BF16")
        assert shuffled == region


@given(loader_views())
def test_equal_sets_of_elements_have_equal_boxes_however_they_are_stored(
    views: tuple[torch.Tensor, torch.Tensor],
) -> None:
    source, target = views
    elsewhere = torch.empty_like(source, memory_format=torch.contiguous_format)
    one = compose("w", view_of(source), view_of(target), 0, "BF16").source
    assert one == compose("w", view_of(source), view_of(elsewhere), 3, "F32").source
    starts, length = runs(one)
    assert sorted(source.flatten().tolist()) == [int(s) + i for s in starts for i in range(length)]


def test_a_scalar_is_one_element() -> None:
    region = compose("scale", View(0, (), ()), View(7, (), ()), 2, "F32")
    assert (region.numel, region.sizes, region.target_offset) == (1, (), 7)


def test_a_whole_tensor_is_one_run() -> None:
    region = compose("w", View(0, (4, 6), (6, 1)), View(100, (4, 6), (6, 1)), 0, "BF16")
    assert (region.sizes, region.source_strides, region.target_strides) == ((24,), (1,), (1,))


def test_a_scalar_copied_into_a_one_element_vector_is_a_plain_copy() -> None:
    assert compose("s", View(0, (), ()), View(3, (1,), (1,)), 0, "F32").numel == 1


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        (View(0, (1, 4), (4, 1)), View(0, (3, 4), (4, 1)), "one checkpoint element to 3 places"),
        (View(0, (4,), (1,)), View(0, (3, 4), (4, 1)), "one checkpoint element to 3 places"),
        (View(0, (3, 4), (0, 1)), View(0, (3, 4), (4, 1)), "one checkpoint element to 3 places"),
        (View(0, (3, 4), (4, 1)), View(0, (3, 4), (0, 1)), "written by the loader"),
        (View(0, (3, 4), (1, 1)), View(0, (3, 4), (4, 1)), "read by the loader"),
        (View(0, (3, 5), (5, 1)), View(0, (3, 4), (4, 1)), "cannot be copied into"),
        (View(0, (2, 3, 4), (12, 4, 1)), View(0, (3, 4), (4, 1)), "cannot be copied into"),
    ],
)
def test_a_copy_that_is_no_bijection_is_refused(source: View, target: View, why: str) -> None:
    with pytest.raises(UnsupportedLayout, match=why):
        compose("w", source, target, 0, "BF16")


boxes = st.builds(
    lambda shape, offset: Box.of(View(offset, tuple(n for n, _ in shape), _nested_strides(shape))),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=0, max_size=3),
    st.integers(0, 30),
)


def _nested_strides(shape: list[tuple[int, int]]) -> tuple[int, ...]:
    strides: list[int] = []
    below = 1
    for size, gap in reversed(shape):
        strides.append(below + gap)
        below = strides[-1] * size
    return tuple(reversed(strides))


def positions(box: Box) -> set[int]:
    starts, length = runs(box)
    return {int(s) + i for s in starts for i in range(length)}


@given(st.lists(boxes, min_size=2, max_size=5))
def test_an_overlap_is_found_exactly_when_two_boxes_share_a_position(some: list[Box]) -> None:
    sets = [positions(box) for box in some]
    found = first_overlap(some)
    if found is None:
        assert sum(map(len, sets)) == len(set().union(*sets))
    else:
        one, other = found
        assert one != other and sets[one] & sets[other]


def test_columns_side_by_side_are_disjoint_without_being_enumerated() -> None:
    rows, columns, ranks = 1 << 30, 4096, 8
    width = columns // ranks
    parts = [Box(rank * width, (rows, width), (columns, 1)) for rank in range(ranks)]
    assert first_overlap(parts) is None
    assert first_overlap([*parts, Box(width - 1, (rows, 1), (columns, 1))]) is not None


def test_interleaved_elements_are_disjoint_without_being_enumerated() -> None:
    pair = [Box(0, (1 << 40,), (2,)), Box(1, (1 << 40,), (2,))]
    assert first_overlap(pair) is None


def test_a_layout_too_scattered_to_prove_is_refused() -> None:
    one, other = Box(0, (1 << 30,), (2,)), Box(1, ((1 << 30) - 1,), (2,))
    with pytest.raises(UnsupportedLayout, match="runs"):
        first_overlap([one, other])
