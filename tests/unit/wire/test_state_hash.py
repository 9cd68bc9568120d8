"""The state hash is that of docs/protocol.md, written out here once more as slowly and plainly as possible."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vllm_delta_sync import native
from vllm_delta_sync.wire import dtypes, state_hash
from vllm_delta_sync.wire.tensors import TensorSpec

MASK = (1 << 64) - 1


def mix64(v: int) -> int:
    z = v * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def signed(value: int) -> int:
    return value - 0x10000 if value & 0x8000 else value


def plain_hash(spec: TensorSpec, raw: bytes) -> list[int]:
    text = f"vllm-delta-sync state hash 1\0{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}"
    digest = hashlib.sha256(text.encode()).digest()
    seeds = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    units = list(raw) if spec.width == 1 else np.frombuffer(raw, "<u2").tolist()
    lanes = [0, 0, 0, 0]
    for i, unit in enumerate(units):
        halves = [mix64((seed + i // 1024) & MASK) >> shift & 0xFFFFFFFF for seed in seeds for shift in (0, 32)]
        table = mix64(i % 1024 + 1)
        once = unit * (2 * unit + 1) & 0xFFFF
        swapped = once << 8 & 0xFFFF | once >> 8
        twice = swapped * (2 * swapped + 1) & 0xFFFF
        for lane in range(4):
            key = signed(table >> 16 * lane & 0xFFFF | 1)
            lanes[lane] += (halves[lane] | 1) * key * signed(once if lane < 2 else twice)
    return [lane % (1 << 32) for lane in lanes]


@pytest.mark.parametrize("name", [dtypes.by_code(code).name for code in range(1, 13)])
@pytest.mark.parametrize("shape", [(), (3, 700), (0, 2)])
def test_lanes_are_those_of_the_protocol(name: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("layers.0.Ω", name, shape)
    raw = np.random.default_rng(5).integers(0, 256, spec.nbytes, np.uint8).tobytes()
    assert state_hash.of_tensor(spec, np.frombuffer(raw, dtypes.by_name(name).bits)).tolist() == plain_hash(spec, raw)


def test_a_change_adds_its_effect() -> None:
    spec = TensorSpec("t", "BF16", (5000,))
    rng = np.random.default_rng(6)
    old, new = (rng.integers(0, 1 << 16, 5000).astype(np.uint16) for _ in range(2))
    changes = native.diff(old.copy(), new, advance=False)
    effect = native.hash_changes(changes.positions, 0, changes.old, changes.new, state_hash.seed(spec))
    assert state_hash.add(state_hash.of_tensor(spec, old), effect).tolist() == state_hash.of_tensor(spec, new).tolist()
    assert state_hash.add(np.zeros(4, np.uint32), effect).tolist() == effect.tolist()


def test_the_state_root_is_that_of_the_protocol_in_any_order() -> None:
    specs = [TensorSpec("b", "BF16", (2, 3)), TensorSpec("a", "F32", ()), TensorSpec("ä", "I8", (1,))]
    lanes = {spec: np.arange(index, index + 4, dtype=np.uint32) for index, spec in enumerate(specs)}
    text = (
        "a\0F32\0\0" + "00000001000000020000000300000004\n"
        "b\0BF16\0" + "2,3\0" + "00000000000000010000000200000003\n"
        "ä\0I8\0" + "1\0" + "00000002000000030000000400000005\n"
    )
    assert state_hash.state_root(lanes) == hashlib.sha256(text.encode()).hexdigest()
    assert state_hash.state_root(dict(reversed(lanes.items()))) == state_hash.state_root(lanes)
