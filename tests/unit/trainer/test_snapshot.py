"""The snapshot finds exactly the elements whose published bits differ, in any kind of tensor, and can go back."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.native.special import SPECIAL
from vllm_delta_sync.errors import BaseMismatch, ConfigError
from vllm_delta_sync.trainer import source
from vllm_delta_sync.trainer.frozen import FrozenState
from vllm_delta_sync.trainer.snapshot import Delta, Snapshot, dense_may_win
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec


def bf16(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


def snapshot_of(tensors: dict[str, torch.Tensor], threads: int = 2) -> Snapshot:
    specs = {name: source.spec_of(name, tensor, torch.bfloat16) for name, tensor in tensors.items()}
    return Snapshot({n: (s, source.read_bits(tensors[n], s, 0, s.numel)) for n, s in specs.items()}, threads)


def held(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, (_, bits) in snapshot.tensors.items()}


def lanes_from_scratch(snapshot: Snapshot) -> dict[TensorSpec, list[int]]:
    return {spec: state_hash.of_tensor(spec, bits).tolist() for spec, bits in snapshot.tensors.values()}


def published(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to(torch.bfloat16).contiguous().view(-1).view(torch.int16).numpy().tobytes()


bits16 = st.lists(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF)), min_size=1, max_size=60)


@settings(max_examples=50, deadline=None)
@given(st.data(), bits16)
def test_every_bf16_bit_pattern_is_followed_and_exactly_the_changed_ones_are_listed(
    data: st.DataObject, old: list[int]
) -> None:
    new = data.draw(st.lists(st.one_of(st.sampled_from(SPECIAL + old)), min_size=len(old), max_size=len(old)))
    snapshot = snapshot_of({"w": bf16(old)})
    delta = snapshot.advance([("w", bf16(new))])
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    listed = [int(p) + block.start for block in delta.blocks for p in block.changes.positions]
    assert listed == changed
    assert [int(b) for block in delta.blocks for b in block.changes.old] == [old[i] for i in changed]
    assert held(snapshot)["w"] == np.array(new, np.uint16).tobytes()
    assert {s: h.tolist() for s, h in snapshot.lanes.items()} == lanes_from_scratch(snapshot)
    assert delta.state_root == state_hash.state_root(snapshot.lanes)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_fp32_is_published_as_torch_casts_it(data: st.DataObject) -> None:
    # Halfway cases of bf16 and their neighbours, and any float. What torch makes of an fp32 NaN's payload depends on
    # where it stands in a vector register, so NaN is checked as NaN.
    halfway = st.builds(
        lambda hi, low: (hi << 16) | low, st.integers(0, 0xFFFF), st.sampled_from([0x7FFF, 0x8000, 0x8001])
    )
    words = data.draw(st.lists(st.one_of(halfway, st.integers(0, 2**32 - 1)), min_size=1, max_size=50))
    master = torch.from_numpy(np.array(words, np.uint32).view(np.float32))
    snapshot = snapshot_of({"w": torch.zeros(len(words))})
    snapshot.advance([("w", master)])
    got = torch.from_numpy(np.frombuffer(held(snapshot)["w"], np.int16).copy()).view(torch.bfloat16)
    real = ~master.isnan()
    assert torch.equal(got[real].view(torch.int16), master.to(torch.bfloat16)[real].view(torch.int16))
    assert bool(got[~real].isnan().all())


@st.composite
def views(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any rank 0 to 4 and any strides: permuted, narrowed, stepped, expanded, offset."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tensor = torch.randn([n * 2 + 1 for n in shape], generator=generator).to(dtype)
    for dim, size in enumerate(shape):
        if draw(st.booleans()):
            tensor = tensor.narrow(dim, draw(st.integers(0, size + 1)), size)
        elif draw(st.booleans()):
            tensor = tensor.narrow(dim, 0, 1).expand(*[size if d == dim else -1 for d in range(len(shape))])
        else:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]))
def test_any_rank_strides_and_dtype_are_read_in_row_major_order(data: st.DataObject, dtype: torch.dtype) -> None:
    tensor = data.draw(views(dtype))
    spec = TensorSpec("w", "BF16", tuple(tensor.shape))
    snapshot = Snapshot({"w": (spec, np.zeros(spec.numel, np.uint16))}, 1)
    snapshot.advance([("w", tensor)])
    assert held(snapshot)["w"] == published(tensor)
    start = data.draw(st.integers(0, spec.numel))
    count = data.draw(st.integers(0, spec.numel - start))
    part = source.read_bits(tensor, spec, start, count)
    assert part.tobytes() == published(tensor)[2 * start : 2 * (start + count)]


def test_a_tensor_of_many_blocks_and_pieces_is_followed() -> None:
    old = torch.randn(5000, 2000)
    new = old.clone()
    at = torch.randint(0, old.numel(), (30_000,), generator=torch.Generator().manual_seed(1))
    new.view(-1)[at] += 1
    snapshot = snapshot_of({"w": old})
    for tensor in (new, new.T.contiguous().T, new.to(torch.bfloat16), old):
        delta = snapshot.advance([("w", tensor)])
        assert held(snapshot)["w"] == published(tensor)
        assert {s: h.tolist() for s, h in snapshot.lanes.items()} == lanes_from_scratch(snapshot)
        assert delta.changed in (0, len(at.unique()))
    assert len({block.start for block in delta.blocks}) == 8


def test_versions_are_taken_back_newest_first() -> None:
    states = [{"a": torch.randn(300), "b": torch.randn(7, 9)} for _ in range(4)]
    states[2]["a"] = states[1]["a"]
    snapshot = snapshot_of(states[0])
    kept, deltas = [held(snapshot)], []
    for state in states[1:]:
        deltas.append(snapshot.advance(state.items()))
        kept.append(held(snapshot))
    for delta, before in zip(reversed(deltas), reversed(kept[:-1]), strict=True):
        snapshot.undo(delta)
        snapshot.undo(delta)
        assert held(snapshot) == before
        assert {s: h.tolist() for s, h in snapshot.lanes.items()} == lanes_from_scratch(snapshot)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": torch.ones(3)}, r"1 of the base's 2 tensors are missing.*\(b\)"),
        ({"a": torch.ones(3), "b": torch.ones(5)}, r"b: has shape \[5\], the base \[4\]"),
        ({"a": torch.ones(3), "b": torch.ones(4, dtype=torch.int64)}, "b: is torch.int64, the base torch.bfloat16"),
    ],
)
def test_weights_that_are_not_the_bases_are_refused_and_leave_no_trace(
    weights: dict[str, torch.Tensor], words: str
) -> None:
    snapshot = snapshot_of({"a": torch.zeros(3), "b": torch.zeros(4)})
    before = held(snapshot), snapshot.lanes.copy()
    with pytest.raises(BaseMismatch, match=words):
        snapshot.advance(weights.items())
    assert (held(snapshot), snapshot.lanes) == before


def test_weights_whose_making_fails_halfway_leave_no_trace() -> None:
    def gathered():  # type: ignore[no-untyped-def]
        yield "a", torch.ones(3)
        raise RuntimeError("the gather timed out")

    snapshot = snapshot_of({"a": torch.zeros(3), "b": torch.zeros(4)})
    before = held(snapshot)
    with pytest.raises(RuntimeError, match="the gather timed out"):
        snapshot.advance(gathered())
    assert held(snapshot) == before


def test_an_advance_that_is_interrupted_twice_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = snapshot_of({"a": bf16([1, 2, 3])})
    before = held(snapshot)
    compare, begun, pressed, ended = snapshot._compare, threading.Event(), threading.Event(), threading.Event()

    def slow(*block: Any) -> None:
        begun.set()
        assert pressed.wait(10)
        compare(*block)
        ended.set()

    def impatient() -> None:
        assert begun.wait(10)
        for _ in range(2):
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.2)
        pressed.set()

    monkeypatch.setattr(snapshot, "_compare", slow)
    presser = threading.Thread(target=impatient)
    # Another signal, treated as Ctrl-C: SIGINT is ignored by what a shell has started in the background.
    handled = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            snapshot.advance([("a", bf16([1, 7, 3]))])
    finally:
        presser.join()
        signal.signal(signal.SIGUSR1, handled)
    assert ended.wait(10)
    assert held(snapshot) == before


def test_an_advance_that_cannot_be_told_to_who_holds_a_frozen_state_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = snapshot_of({"a": bf16([1, 2, 3])})
    before = held(snapshot), lanes_from_scratch(snapshot)
    with snapshot.freeze({}) as first, snapshot.freeze({}) as second:
        told: list[FrozenState] = []

        def moved_on(frozen: FrozenState, delta: Delta) -> None:
            if told:
                raise MemoryError
            told.append(frozen)
            real(frozen, delta)

        real = FrozenState.moved_on
        with monkeypatch.context() as patch:
            patch.setattr(FrozenState, "moved_on", moved_on)
            with pytest.raises(MemoryError):
                snapshot.advance([("a", bf16([1, 7, 3]))])
        assert (held(snapshot), lanes_from_scratch(snapshot)) == before
        assert {spec: [*lanes] for spec, lanes in snapshot.lanes.items()} == before[1]
        assert snapshot.advance([("a", bf16([1, 7, 3]))]).changed == 1
        for frozen in (first, second):
            assert [*frozen.read(snapshot.specs["a"])] == [1, 2, 3]


def test_what_the_callers_stream_still_writes_is_waited_for_before_other_threads_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []
    read = source.view_bits

    def recorded(tensor: torch.Tensor, spec: TensorSpec) -> source.Bits | None:
        calls.append(("read", id(tensor)))
        return read(tensor, spec)

    snapshot = snapshot_of({"a": torch.zeros(3)})
    monkeypatch.setattr(source, "finish_writes", lambda tensor: calls.append(("wait", id(tensor))))
    monkeypatch.setattr(source, "view_bits", recorded)
    weights = torch.ones(3)
    snapshot.advance([("a", weights)])
    assert calls == [("wait", id(weights)), ("read", id(weights))]


def test_a_cuda_tensor_is_waited_for_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    device = torch.device("cuda", 1)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    source.finish_writes(SimpleNamespace(device=device))  # type: ignore[arg-type]
    source.finish_writes(torch.ones(1))
    assert waited == [device]


def test_a_name_given_twice_must_hold_the_same_bits() -> None:
    snapshot = snapshot_of({"a": torch.zeros(3)})
    snapshot.advance([("a", torch.ones(3)), ("a", torch.ones(3).to(torch.bfloat16))])
    before = held(snapshot)
    with pytest.raises(BaseMismatch, match="a: comes twice"):
        snapshot.advance([("a", torch.full((3,), 2.0)), ("a", torch.tensor([2.0, 2.0, 3.0]))])
    assert held(snapshot) == before


def test_integers_and_booleans_and_fp8_are_published_as_they_are() -> None:
    state = {
        "i": torch.tensor(7),
        "b": torch.tensor([True, False]),
        "f": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "d": torch.arange(4, dtype=torch.int32),
    }
    snapshot = snapshot_of(state)
    assert [spec.dtype for spec in snapshot.specs.values()] == ["I64", "BOOL", "F8_E4M3", "I32"]
    new = {"i": torch.tensor(8), "b": ~state["b"], "f": state["f"][[1, 0]], "d": state["d"] * 2}
    assert snapshot.advance(new.items()).changed == 1 + 2 + 2 + 3
    assert held(snapshot)["d"] == new["d"].numpy().tobytes()


def test_a_block_is_kept_whole_exactly_where_a_dense_copy_may_be_smaller() -> None:
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    sparse, dense = old.clone(), old.clone()
    sparse[::3] = 1
    dense[:80_000] = 1
    snapshot = snapshot_of({"w": old})
    assert snapshot.advance([("w", sparse)]).blocks[0].current is None
    snapshot.advance([("w", old)])
    block = snapshot.advance([("w", dense)]).blocks[0]
    assert block.current is not None and block.current.tobytes() == published(dense)
    snapshot.advance([("w", old)])
    assert block.current.tobytes() == published(dense), "the copy must not move with the snapshot"
    assert dense_may_win(1, 1, 2) and not dense_may_win(6_000, 1_000_000, 2)


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(2).to_sparse()])
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"model\.w: has no dense memory"):
        source.spec_of("model.w", tensor, torch.bfloat16)


def test_a_dtype_that_the_log_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.w: torch\.complex64 cannot be published"):
        source.spec_of("model.w", torch.zeros(2, dtype=torch.complex64), torch.bfloat16)
