"""Who holds which part of a tensor, over ranks: tables of splits, copies, gaps and overlaps."""

from __future__ import annotations

import time

import pytest

from vllm_delta_sync.errors import UnsupportedLayout
from vllm_delta_sync.serving.affine import Region, View, compose
from vllm_delta_sync.serving.coverage import Group, cover
from vllm_delta_sync.wire.tensors import TensorSpec


def rows(name: str, shape: tuple[int, int], start: int, count: int, *, pitch: int = 0) -> Region:
    """Rows start … start+count−1 of a matrix; `pitch`: live elements per row, when rows are padded."""
    view = View(start * shape[1], (count, shape[1]), (shape[1], 1))
    return compose(name, view, View(0, (count, shape[1]), (pitch or shape[1], 1)), 0, "BF16")


def columns(name: str, shape: tuple[int, int], start: int, count: int) -> Region:
    return compose(
        name, View(start, (shape[0], count), (shape[1], 1)), View(0, (shape[0], count), (count, 1)), 0, "BF16"
    )


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "BF16", shape)


def test_a_tensor_on_one_rank_is_one_group() -> None:
    coverage = cover([[rows("w", (4, 6), 0, 4)]], [spec("w", 4, 6)])
    assert coverage.groups == (Group("w", ((0, 0),)),)
    assert coverage.unmapped == ()


def test_row_and_column_splits_are_groups_of_one() -> None:
    ranks = [[rows("up", (4, 6), 2 * rank, 2), columns("down", (4, 6), 3 * rank, 3)] for rank in range(2)]
    coverage = cover(ranks, [spec("down", 4, 6), spec("up", 4, 6)])
    assert coverage.groups == (
        Group("down", ((0, 1),)),
        Group("down", ((1, 1),)),
        Group("up", ((0, 0),)),
        Group("up", ((1, 0),)),
    )


def test_replicas_are_copies_of_the_lowest_rank() -> None:
    ranks = [[rows("k", (4, 6), 2 * (rank // 2), 2)] for rank in range(4)]
    assert cover(ranks, [spec("k", 4, 6)]).groups == (Group("k", ((0, 0), (1, 0))), Group("k", ((2, 0), (3, 0))))


def test_a_table_used_twice_on_one_rank_is_held_twice() -> None:
    table = rows("embed", (4, 6), 0, 4)
    head = rows("embed", (4, 6), 0, 4, pitch=8)
    assert cover([[table, head]], [spec("embed", 4, 6)]).groups == (Group("embed", ((0, 0), (0, 1))),)


def test_a_tensor_that_only_a_later_rank_holds_has_its_canonical_region_there() -> None:
    coverage = cover([[], [rows("head", (4, 6), 0, 4)]], [spec("head", 4, 6)])
    assert coverage.groups == (Group("head", ((1, 0),)),)


def test_a_tensor_that_no_rank_holds_is_listed() -> None:
    coverage = cover([[rows("w", (4, 6), 0, 4)], []], [spec("pooler", 3), spec("w", 4, 6), spec("empty", 0, 5)])
    assert coverage.unmapped == ("pooler",)


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ([[rows("w", (4, 6), 0, 2)], [rows("w", (4, 6), 1, 3)]], "rank 0 .* rank 1 .* overlap"),
        ([[rows("w", (4, 6), 0, 4)], [columns("w", (4, 6), 0, 3)]], "overlap"),
        ([[columns("w", (4, 6), 0, 4)], [columns("w", (4, 6), 3, 3)]], "overlap"),
        ([[rows("w", (4, 6), 0, 2)], [rows("w", (4, 6), 0, 2)]], "12 of its 24 elements"),
        ([[columns("w", (4, 6), 0, 3)], [columns("w", (4, 6), 3, 2)]], "20 of its 24 elements"),
        ([[rows("w", (5, 6), 0, 5)]], "up to 29 of a tensor of 24"),
        ([[rows("w", (4, 6), 0, 4), rows("x", (1, 1), 0, 1)]], "'x', which is not a tensor of the checkpoint"),
    ],
)
def test_a_split_that_does_not_hold_each_element_once_is_refused(held: list[list[Region]], why: str) -> None:
    with pytest.raises(UnsupportedLayout, match=why):
        cover(held, [spec("w", 4, 6)])


def test_a_dense_70b_model_at_tp_8_takes_well_under_two_seconds() -> None:
    hidden, heads, width, layers, ranks = 8192, 1024, 28672, 80, 8
    specs: list[TensorSpec] = []
    held: list[list[Region]] = [[] for _ in range(ranks)]
    for layer in range(layers):
        split = {
            "q": (hidden, hidden, rows),
            "k": (heads, hidden, rows),
            "v": (heads, hidden, rows),
            "gate": (width, hidden, rows),
            "up": (width, hidden, rows),
            "o": (hidden, hidden, columns),
            "down": (hidden, width, columns),
        }
        for name, (out, into, cut) in split.items():
            full = f"{layer}.{name}"
            specs.append(spec(full, out, into))
            part = (out if cut is rows else into) // ranks
            for rank in range(ranks):
                held[rank].append(cut(full, (out, into), rank * part, part))
        for name in ("n1", "n2"):
            specs.append(spec(f"{layer}.{name}", 1, hidden))
            for rank in range(ranks):
                held[rank].append(rows(f"{layer}.{name}", (1, hidden), 0, 1))
    started = time.process_time()
    coverage = cover(held, specs)
    seconds = time.process_time() - started
    assert len(coverage.groups) == layers * (7 * ranks + 2)
    assert seconds < 2.0


def test_experts_cut_by_columns_out_of_one_tensor_are_recognised() -> None:
    experts, out, into, ranks = 64, 512, 256, 4
    part = into // ranks
    held = [
        [
            compose(
                "experts.down",
                View(expert * out * into + rank * part, (out, part), (into, 1)),
                View(expert * out * part, (out, part), (part, 1)),
                0,
                "BF16",
            )
            for expert in range(experts)
        ]
        for rank in range(ranks)
    ]
    assert len(cover(held, [spec("experts.down", experts, out, into)]).groups) == experts * ranks
