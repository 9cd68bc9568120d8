"""Two nodes that serve one model between them fetch hardly more than what each holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_log
from counting_store import CountingStore

from vllm_delta_sync.log import LogWriter
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.serving.affine import Region, View, compose
from vllm_delta_sync.serving.needs import needs_of
from vllm_delta_sync.wire.manifest import BaseRef, Manifest
from vllm_delta_sync.wire.tensors import TensorSpec

LAYERS = 4
ROWS, COLUMNS = 2048, 1024  # two blocks a tensor
SPECS = tuple(
    spec
    for layer in range(LAYERS)
    for spec in (
        TensorSpec(f"layers.{layer}.gate", "BF16", (ROWS, COLUMNS)),
        TensorSpec(f"layers.{layer}.down", "BF16", (ROWS, COLUMNS)),
        TensorSpec(f"layers.{layer}.norm", "BF16", (COLUMNS,)),
    )
)


def region(spec: TensorSpec, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Region:
    """A view of a tensor that is copied somewhere of its own."""
    packed = tuple(int(np.prod(sizes[dim + 1 :])) for dim in range(len(sizes)))
    return compose(spec.name, View(offset, sizes, strides), View(0, sizes, packed), 0, "BF16")


def whole(spec: TensorSpec) -> Region:
    return region(spec, 0, (spec.numel,), (1,))


def by_rows(spec: TensorSpec, rank: int, ranks: int) -> Region:
    rows = ROWS // ranks
    return region(spec, rank * rows * COLUMNS, (rows, COLUMNS), (COLUMNS, 1))


def by_columns(spec: TensorSpec, rank: int, ranks: int) -> Region:
    columns = COLUMNS // ranks
    return region(spec, rank * columns, (ROWS, columns), (COLUMNS, 1))


def split(rank: int, ranks: int, *ways: str) -> list[Region]:
    """A rank of a tensor-parallel model; `ways`: which of its large tensors are split by columns."""
    found = []
    for spec in SPECS:
        kind = spec.name.rpartition(".")[2]
        if kind == "norm":
            found.append(whole(spec))
        else:
            found.append((by_columns if kind in ways else by_rows)(spec, rank, ranks))
    return found


def stage_of(node: int) -> list[Region]:
    """Half of the layers."""
    return [whole(spec) for spec in SPECS if int(spec.name.split(".")[1]) // (LAYERS // 2) == node]


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> tuple[CountingStore, Manifest]:
    """One version in which a hundredth of the elements changed."""
    rng = np.random.default_rng(0)
    old = {spec.name: (spec, rng.integers(0, 1 << 16, spec.numel, np.uint16)) for spec in SPECS}
    new = {name: (spec, bits.copy()) for name, (spec, bits) in old.items()}
    for spec, bits in new.values():
        hit = rng.integers(0, spec.numel, max(4, spec.numel // 100))
        bits[hit] += np.uint16(1)
    where = tmp_path_factory.mktemp("bucket")
    writer = LogWriter.create(str(where), tiny_log.lanes_of(old), base=BaseRef(model="made by hand"))
    manifest = writer.commit(
        tiny_log.updates_between(old, new), state_root=tiny_log.state_hash.state_root(tiny_log.lanes_of(new))
    )
    return CountingStore(writer.log.store), manifest


def fetched_by_node(
    payload: tuple[CountingStore, Manifest], cache: Path, ranks: Sequence[list[Region]]
) -> tuple[int, int]:
    """(bytes that the store gave, bytes needed) for all ranks of one node; each rank gets every block it holds."""
    store, manifest = payload
    before = store.bytes
    readers = [
        (Fetcher(store, NodeCache(cache, 1 << 30), needs), needs)
        for needs in (needs_of(regions, SPECS) for regions in ranks)
    ]
    for reader, needs in readers:
        table = reader.table(manifest)
        assert {(block.tensor, block.start) for block, _ in reader.blocks(manifest, table)} == {
            (block.tensor, block.start) for block in table.blocks if needs.wants(block)
        }
    assert sum(reader.fetched_bytes for reader, _ in readers) == store.bytes - before
    return store.bytes - before, readers[0][0].needed_bytes


@pytest.mark.parametrize(
    ("what", "nodes"),
    [
        ("pipeline", [[stage_of(0)], [stage_of(1)]]),
        ("rows", [[split(0, 2)], [split(1, 2)]]),
        ("rows, two ranks a node", [[split(0, 4), split(1, 4)], [split(2, 4), split(3, 4)]]),
    ],
)
def test_a_node_of_two_fetches_its_half(
    payload: tuple[CountingStore, Manifest], tmp_path: Path, what: str, nodes: list[list[list[Region]]]
) -> None:
    _, manifest = payload
    for number, ranks in enumerate(nodes):
        came, needed = fetched_by_node(payload, tmp_path / f"{what}{number}", ranks)
        assert came / needed <= 1.1
        assert came <= 1.1 * (manifest.table.size + (manifest.totals.bytes - manifest.table.size) / 2)


def test_columns_cross_every_block_so_that_each_node_fetches_those_tensors_whole(
    payload: tuple[CountingStore, Manifest], tmp_path: Path
) -> None:
    _, manifest = payload
    came, needed = fetched_by_node(payload, tmp_path, [split(0, 2, "down")])
    assert came / needed <= 1.1
    assert came == pytest.approx(0.75 * manifest.totals.bytes, rel=0.05)


def test_all_ranks_of_a_model_on_one_node_fetch_whole_shards(
    payload: tuple[CountingStore, Manifest], tmp_path: Path
) -> None:
    store, manifest = payload
    store.gets.clear()
    came, _ = fetched_by_node(payload, tmp_path, [split(rank, 4, "down") for rank in range(4)])
    assert came == manifest.totals.bytes
    assert len(store.gets) == len(manifest.shards)


EXPERTS = TensorSpec("experts", "BF16", (8, 1024, 1024))


@pytest.mark.parametrize(
    ("regions", "ranges"),
    [
        ([whole(SPECS[0])], {SPECS[0].name: ((0, 1 << 21),)}),
        ([by_rows(SPECS[0], 1, 2)], {SPECS[0].name: ((1 << 20, 2 << 20),)}),
        ([by_columns(SPECS[0], 0, 2)], {SPECS[0].name: ((0, (1 << 21) - COLUMNS // 2),)}),
        # every fourth expert: far enough apart to be ranges of their own
        (
            [region(EXPERTS, 1 << 20, (2, 1 << 20), (4 << 20, 1))],
            {"experts": ((1 << 20, 2 << 20), (5 << 20, 6 << 20))},
        ),
        # half the rows of each expert
        (
            [region(EXPERTS, 0, (8, 1 << 19), (1 << 20, 1))],
            {"experts": tuple((n << 20, (n << 20) + (1 << 19)) for n in range(8))},
        ),
        ([region(TensorSpec("scale", "BF16", ()), 0, (), ())], {"scale": ((0, 1),)}),
        ([], {}),
    ],
)
def test_needs_are_the_elements_that_regions_span(
    regions: list[Region], ranges: dict[str, tuple[tuple[int, int], ...]]
) -> None:
    assert needs_of(regions, (*SPECS, EXPERTS)).ranges == ranges


def test_a_rank_that_holds_the_whole_model_needs_everything() -> None:
    assert needs_of([whole(spec) for spec in SPECS], SPECS).ranges is None
    assert needs_of([whole(spec) for spec in SPECS[1:]], SPECS).ranges is not None
