"""The commit's phases, run on a host, write what the CPU's scatter writes, or nothing at all."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.on_host import COMPILER, HostLibrary, build
from vllm_delta_sync import kernels, native
from vllm_delta_sync.kernels import cuda, places
from vllm_delta_sync.kernels.patch import Prepared
from vllm_delta_sync.kernels.upload import SIGNED

CPU = torch.device("cpu")
quick = settings(max_examples=25, deadline=None)
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C++ compiler on this machine to compile the kernels with"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    return build(tmp_path_factory.mktemp("on-host"))


def patch(width: int, lengths: list[int], seed: int) -> tuple[Prepared, np.ndarray]:
    """An update of two storages, a segment of so many elements after the other, and its segments."""
    rng, total = np.random.default_rng(seed), sum(lengths)
    live = [rng.integers(0, 256, (3 * total + 9) * width, np.uint8).view(SIGNED[width]) for _ in range(2)]
    ends = np.cumsum([0, *lengths])
    segments = np.zeros((len(lengths), 4), np.int64)
    offsets, expected = np.zeros(total, np.int32), np.zeros(total, SIGNED[width])
    for row, (first, last) in enumerate(pairwise(ends.tolist())):
        segments[row] = row % 2, 2 * first + row, first, last
        offsets[first:last] = np.sort(rng.choice(2 * (last - first), last - first, replace=False))
        expected[first:last] = live[row % 2][segments[row, 1] + offsets[first:last]]
    targets = tuple(torch.from_numpy(storage) for storage in live)
    columns = (torch.from_numpy(column) for column in (offsets, expected, expected ^ 1))
    return Prepared(targets, torch.from_numpy(places.rows(targets, segments)), *columns), segments


def commit(library: HostLibrary, prepared: Prepared, backwards: bool) -> int:
    if not backwards:
        return int(cuda.write(library, prepared, CPU, 0))
    with library.backwards():
        return int(cuda.write(library, prepared, CPU, 0))


def on_cpu(prepared: Prepared) -> tuple[int, list[torch.Tensor]]:
    """What the CPU's library answers, and what storages are then."""
    targets = tuple(target.clone() for target in prepared.targets)
    moved = prepared.places.numpy().copy()
    for target, copy in zip(prepared.targets, targets, strict=True):
        inside = (moved[:, 0] >= target.data_ptr()) & (moved[:, 0] < target.data_ptr() + target.nbytes)
        moved[inside, 0] += copy.data_ptr() - target.data_ptr()
    columns = (prepared.offsets, prepared.expected, prepared.values)
    bits = (column.numpy().view(f"u{column.element_size()}") for column in columns)
    return native.scatter(moved, *bits, threads=1), list(targets)


lengths_of = st.lists(st.integers(0, 150), min_size=0, max_size=7)


@needs_compiler
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@quick
@given(lengths=lengths_of, seed=st.integers(0, 99), backwards=st.booleans())
def test_one_launch_writes_what_the_cpu_writes_and_its_reverse_undoes_it(
    library: HostLibrary, width: int, lengths: list[int], seed: int, backwards: bool
) -> None:
    prepared, _ = patch(width, lengths, seed)
    before = [target.clone() for target in prepared.targets]
    outcome, wanted = on_cpu(prepared)
    assert commit(library, prepared, backwards) == outcome == -1
    assert all(torch.equal(*pair) for pair in zip(prepared.targets, wanted, strict=True))
    assert commit(library, prepared.reversed(), backwards) == -1
    assert all(torch.equal(*pair) for pair in zip(prepared.targets, before, strict=True))


@needs_compiler
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@quick
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    strays=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3),
    new=st.booleans(),
    backwards=st.booleans(),
)
def test_one_element_that_is_not_as_expected_anywhere_is_named_and_nothing_is_written(
    library: HostLibrary, width: int, lengths: list[int], seed: int, strays: list[float], new: bool, backwards: bool
) -> None:
    prepared, _ = patch(width, lengths, seed)
    before = [target.clone() for target in prepared.targets]
    found = sorted({int(share * prepared.elements) for share in strays})
    expected, values = prepared.expected.clone(), prepared.values.clone()
    expected[found] ^= 2
    if new:  # whatever wrote there wrote what the update would
        values[found] = prepared.expected[found]
    strayed = dataclasses.replace(prepared, expected=expected, values=values)
    assert commit(library, strayed, backwards) == on_cpu(strayed)[0] == found[0]
    assert all(torch.equal(*pair) for pair in zip(prepared.targets, before, strict=True))
    assert commit(library, prepared, backwards) == -1, "what one launch found is nothing to the next"


@quick
@given(lengths=lengths_of, seed=st.integers(0, 99), most=st.integers(1, 200))
def test_runs_cover_every_element_once_and_lead_where_segments_do(lengths: list[int], seed: int, most: int) -> None:
    prepared, segments = patch(2, lengths, seed)
    leads = np.full(prepared.elements, -1, np.int64)
    for address, first, last in places.runs(prepared.targets, segments, most).tolist():
        assert 0 < last - first <= most and (leads[first:last] == -1).all()
        leads[first:last] = address
    for target, base, first, last in segments.tolist():
        assert (leads[first:last] == prepared.targets[target].data_ptr() + 2 * base).all()


def test_a_device_whose_blocks_cannot_wait_for_each_other_gets_no_native_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Alone:
        """A CUDA library on such a device."""

        path = "here"

        def cooperates(self, device: int) -> bool:
            return device != 1

    monkeypatch.setattr(kernels.backend, "_cuda_library", lambda: native.library.Loaded(object(), "here"))
    monkeypatch.setattr(kernels.backend.native_cuda, "CudaLibrary", lambda loaded: Alone())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert kernels.select("native", "cuda:0").name == "native (cuda)"
    with pytest.raises(kernels.backend.ConfigError, match="cuda:1 cannot launch a grid whose blocks wait"):
        kernels.select("native", "cuda:1")
    monkeypatch.setattr(kernels.triton, "why_not", lambda device: None)
    instead = kernels.select("auto", "cuda:1")
    assert instead.name == "triton" and "cuda:1 cannot launch a grid" in instead.reason
