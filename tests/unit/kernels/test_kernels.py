"""Every kernel backend on every device present gives the same bits, and a policy gets what it asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_delta_sync import kernels, native
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels import triton
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import Seed

quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SEED = Seed(2**64 - 17, 12345)


def backends() -> list[kernels.Backend]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = [kernels.select("reference", device) for device in devices]
    for device in devices:
        for threads in (1, 3):
            backend = kernels.select("auto", device, threads=threads)
            if backend.name.startswith("native"):
                found.append(backend)
        if triton.why_not(torch.device(device)) is None:  # on the CPU under Triton's interpreter: see test_triton
            found.append(kernels.select("triton", device))
    return found


@pytest.fixture(params=backends(), ids=lambda backend: f"{backend.name} on {backend.device}")
def backend(request: pytest.FixtureRequest) -> kernels.Backend:
    found: kernels.Backend = request.param
    return found


@dataclass
class Update:
    """An update of two storages in three segments with bases, and what the storages must become."""

    targets: list[torch.Tensor]
    wanted: list[torch.Tensor]
    segments: np.ndarray
    offsets: np.ndarray
    expected: np.ndarray
    values: np.ndarray


def random_update(backend: kernels.Backend, width: int, n: int, key: int) -> Update:
    rng = np.random.default_rng(key)
    dtype = f"u{width}"
    hosts = [rng.integers(0, 256, (4 * n + 20) * width, np.uint8).view(dtype) for _ in range(2)]
    rows = [(1, 11, 0, n // 2), (0, 3, n // 2, n - 2), (1, 2 * n + 15, n - 2, n)]
    offsets, expected = np.zeros(n, np.uint32), np.zeros(n, dtype)
    for target, base, first, last in rows:
        offsets[first:last] = np.sort(rng.choice(2 * n, last - first, replace=False))
        expected[first:last] = hosts[target][base + offsets[first:last]]
    values = expected ^ np.asarray(1, dtype)
    after = [host.copy() for host in hosts]
    for target, base, first, last in rows:
        after[target][base + offsets[first:last]] = values[first:last]

    def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(a.view(np.uint8)).view(INTEGERS[width]).to(backend.device) for a in arrays]

    return Update(tensors(hosts), tensors(after), np.array(rows, np.int64), offsets, expected, values)


def prepared(backend: kernels.Backend, update: Update) -> kernels.Prepared:
    """As a rank has it prepared: in an arena of the device, or where it is."""
    arena = None if backend.device.type == "cpu" else kernels.Arena(4 << 20, backend.device)
    return backend.prepare(update.targets, update, arena)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@quick
@given(n=st.integers(4, 400), key=st.integers(0, 100))
def test_a_patch_is_written_and_its_reverse_undoes_it(backend: kernels.Backend, width: int, n: int, key: int) -> None:
    update = random_update(backend, width, n, key)
    before = [target.clone() for target in update.targets]
    assert backend.scatter(prepared(backend, update)) == -1
    assert all(torch.equal(*pair) for pair in zip(update.targets, update.wanted, strict=True))
    assert backend.scatter(prepared(backend, update).reversed()) == -1
    assert all(torch.equal(*pair) for pair in zip(update.targets, before, strict=True))


@quick
@given(n=st.integers(4, 400), key=st.integers(0, 100), share=st.floats(0, 1, exclude_max=True))
def test_a_stray_write_is_found_and_nothing_is_written(
    backend: kernels.Backend, n: int, key: int, share: float
) -> None:
    update = random_update(backend, 2, n, key)
    before = [target.clone() for target in update.targets]
    strays = sorted({int(share * n), n - 1})
    update.expected[strays] ^= 0x40
    assert backend.scatter(prepared(backend, update)) == strays[0]
    assert all(torch.equal(*pair) for pair in zip(update.targets, before, strict=True))


def test_a_large_patch_over_threads_is_all_or_nothing(backend: kernels.Backend) -> None:
    update = random_update(backend, 2, 250_000, 1)
    before = [target.clone() for target in update.targets]
    update.expected[249_000] ^= 1
    assert backend.scatter(prepared(backend, update)) == 249_000
    assert all(torch.equal(*pair) for pair in zip(update.targets, before, strict=True))
    update.expected[249_000] ^= 1
    assert backend.scatter(prepared(backend, update)) == -1
    assert all(torch.equal(*pair) for pair in zip(update.targets, update.wanted, strict=True))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@quick
@given(n=st.integers(0, 5000), start=st.integers(0, 2**34), a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_every_backend_hashes_to_the_same_lanes(
    backend: kernels.Backend, width: int, n: int, start: int, a: int, b: int
) -> None:
    bits = np.random.default_rng(n).integers(0, 256, n * width, np.uint8).view(f"u{width}")
    tensor = torch.from_numpy(bits.view(np.uint8)).view(INTEGERS[width]).to(backend.device)
    assert np.array_equal(backend.hash(tensor, start, Seed(a, b)), native.hash_run(bits, start, Seed(a, b)))


def test_bf16_tensors_hash_by_their_bits(backend: kernels.Backend) -> None:
    weights = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40, 1.0], dtype=torch.bfloat16)
    bits = weights.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(backend.hash(weights.to(backend.device), 0, SEED), native.hash_run(bits, 0, SEED))


@pytest.mark.parametrize("room", [1 << 20, 768, 0], ids=["all of it", "a part", "nothing"])
def test_what_an_arena_has_no_room_for_stays_in_pinned_memory(
    backend: kernels.Backend, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, pinned = random_update(backend, 2, 100, 1), []
    if backend.device.type == "cpu":  # where torch can pin nothing
        monkeypatch.setattr(
            kernels.backend, "pinned", lambda host: pinned.append(host) or to_device(host, backend.device)
        )
    patch = backend.prepare(update.targets, update, kernels.Arena(room, backend.device))
    columns = [patch.places, patch.offsets, patch.expected, patch.values]  # at most 128, 400, 200 and 200 bytes
    beyond = {1 << 20: 0, 768: 2, 0: 4}[room]
    assert (
        len(pinned) == beyond or [column.is_pinned() for column in columns] == [False] * (4 - beyond) + [True] * beyond
    )
    assert backend.scatter(patch) == -1
    assert all(torch.equal(*pair) for pair in zip(update.targets, update.wanted, strict=True))
    assert backend.scatter(patch.reversed()) == -1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@quick
@given(n=st.integers(0, 20_000), share=st.sampled_from([0.0, 0.01, 1.0]), advance=st.booleans())
def test_every_backend_finds_the_same_changes_in_order(
    backend: kernels.Backend, width: int, n: int, share: float, advance: bool
) -> None:
    rng = np.random.default_rng(n)
    old = rng.integers(0, 256, n * width, np.uint8).view(f"u{width}")
    new = np.where(rng.random(n) < share, ~old, old)
    before, after = (to_device(bits.copy(), backend.device) for bits in (old, new))
    found = backend.diff(before, after, advance)
    for column, wanted in zip(found, native.diff(old.copy(), new, advance=False), strict=True):
        np.testing.assert_array_equal(column.cpu().numpy().view(wanted.dtype), wanted)
    assert torch.equal(before, after if advance else to_device(old, backend.device))


def test_the_operators_take_what_the_schema_says() -> None:
    update = random_update(kernels.select("auto", "cpu"), 2, 50, 3)
    columns = [
        torch.from_numpy(update.segments),
        torch.from_numpy(update.offsets.view(np.int32)),
        torch.from_numpy(update.expected.view(np.int16)),
        torch.from_numpy(update.values.view(np.int16)),
    ]
    outcome = torch.ops.vllm_delta_sync.scatter_(update.targets, *columns)
    assert outcome.dtype == torch.int64 and outcome.item() == -1
    assert all(torch.equal(*pair) for pair in zip(update.targets, update.wanted, strict=True))
    lanes = torch.ops.vllm_delta_sync.state_hash(columns[3], 7, SEED.a - 2**64, SEED.b)
    assert lanes.tolist() == native.hash_run(update.values, 7, SEED).tolist()
    row = torch.arange(5, dtype=torch.int16)
    positions, old, new = torch.ops.vllm_delta_sync.diff(row, torch.tensor([0, 9, 2, 3, 7], dtype=torch.int16), True)
    assert (positions.tolist(), old.tolist(), new.tolist(), row.tolist()) == ([1, 4], [1, 4], [9, 7], [0, 9, 2, 3, 7])


def test_the_operators_refuse_floats_strides_and_foreign_dtypes() -> None:
    live, row = torch.zeros(8, dtype=torch.int16), torch.zeros(2, dtype=torch.int16)
    segments, offsets = torch.tensor([[0, 0, 0, 2]]), torch.zeros(2, dtype=torch.int32)
    scatter_ = torch.ops.vllm_delta_sync.scatter_
    with pytest.raises(TypeError, match="share one dtype"):
        scatter_([live.to(torch.int32)], segments, offsets, row, row)
    with pytest.raises(TypeError, match="integer views"):
        scatter_([live.view(torch.bfloat16)], segments, offsets, row.view(torch.bfloat16), row.view(torch.bfloat16))
    with pytest.raises(TypeError, match="32-bit offsets"):
        scatter_([live], segments, offsets.to(torch.int64), row, row)
    with pytest.raises(ValueError, match="contiguous"):
        scatter_([live[::2]], segments, offsets, row, row)
    with pytest.raises(ValueError, match="contiguous row"):
        torch.ops.vllm_delta_sync.state_hash(live.view(2, 4), 0, 1, 2)
    with pytest.raises(TypeError, match="of one dtype"):
        torch.ops.vllm_delta_sync.diff(live, live.to(torch.int32), False)
    with pytest.raises(ValueError, match="of one length"):
        torch.ops.vllm_delta_sync.diff(live, row, False)


def test_the_operators_have_shapes_without_data() -> None:
    live = torch.zeros(8, dtype=torch.int16, device="meta")
    assert torch.ops.vllm_delta_sync.state_hash(live, 0, 1, 2).shape == (4,)
    segments = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    offsets = torch.zeros(8, dtype=torch.int32, device="meta")
    assert torch.ops.vllm_delta_sync.scatter_([live], segments, offsets, live, live).shape == ()


def test_a_policy_gets_what_it_asks_for_and_native_never_degrades() -> None:
    assert kernels.select("reference", "cpu").name == "reference (torch)"
    automatic = kernels.select("auto", "cpu")
    if native.backend().startswith("native"):
        assert kernels.select("native", "cpu").name == automatic.name == native.backend()
    else:
        assert automatic.name == "reference (torch)" and native.backend_reason() in automatic.reason
        with pytest.raises(ConfigError, match="kernel: native"):
            kernels.select("native", "cpu")
    with pytest.raises(ConfigError, match="no native kernel for meta devices"):
        kernels.select("native", "meta")
    with pytest.raises(ConfigError, match="kernel: triton was asked for on meta"):
        kernels.select("triton", "meta")
    assert kernels.select("auto", "meta").name == "reference (torch)"
