"""The kernels in plain torch: any device, no compiler.

Does not try to be fast; it is what the other backends are compared with, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_delta_sync.kernels.patch import Prepared
from vllm_delta_sync.native.portable_hash import BLOCK, KEYS
from vllm_delta_sync.native.types import I64, Seed

CHUNK = 1 << 20  # 16-bit units per step of the hash
_MASK64 = (1 << 64) - 1


def place(targets: Sequence[Tensor], segments: I64) -> I64:
    """The segments as they are: plain torch knows no addresses."""
    return segments


def write(patch: Prepared) -> Tensor:
    """Commit a patch; returns what `kernels.ops.scatter_` does.

    Compares everything before it writes anything, so there is nothing to undo.
    """
    device = patch.targets[0].device if patch.targets else torch.device("cpu")
    places = []
    for target, base, first, last in patch.places.tolist():
        live = patch.targets[target]
        # The columns of a GPU's patch may be in pinned memory of the host.
        columns = (patch.offsets, patch.expected, patch.values)
        part, was, new = (column[first:last].to(live.device) for column in columns)
        # u32 bits in an int32 tensor: torch indexes with int64 only
        where = (part.view(torch.int32).to(torch.int64) & 0xFFFFFFFF) + base
        wrong = (live[where] != was).nonzero()
        if wrong.numel():
            return torch.tensor(int(wrong[0, 0]) + first, dtype=torch.int64)  # known by now, and nothing is under way
        places.append((live, where, new))
    for live, where, new in places:
        live[where] = new
    return torch.full((), -1, dtype=torch.int64, device=device)  # behind what was written: who reads it waits for that


def diff(before: Tensor, after: Tensor, advance: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.ops`."""
    where = (before != after).nonzero()[:, 0]
    old, new = before[where], after[where]
    if advance:
        before[where] = new
    return where.to(torch.int32), old, new


def state_hash(bits: Tensor, start: int, seed: Seed) -> Tensor:
    """See `kernels.ops`."""
    units = bits.view(torch.uint8).to(torch.int16) if bits.element_size() == 1 else bits.view(torch.int16)
    first = start * max(1, bits.element_size() // 2)
    total = torch.zeros(4, dtype=torch.int64, device=bits.device)
    for at in range(0, units.numel(), CHUNK):
        total += _hash_units(units[at : at + CHUNK], first + at, seed)
    return total & 0xFFFFFFFF


def _readings(units: Tensor) -> Tensor:
    """What each lane reads of int16 units [n]: int16 [n, 4]."""
    once = _quadratic(units)
    swapped = (once << 8) | ((once >> 8) & 0xFF)
    twice = _quadratic(swapped)
    return torch.stack([once, once, twice, twice], dim=1)


def _quadratic(u: Tensor) -> Tensor:
    """q of docs/protocol.md on int16, whose products wrap mod 2**16."""
    return u * (u + u + 1)


def _hash_units(units: Tensor, first: int, seed: Seed) -> Tensor:
    lead = first % BLOCK
    blocks = (lead + units.numel() + BLOCK - 1) // BLOCK
    padded = torch.zeros((blocks * BLOCK, 4), dtype=torch.int64, device=units.device)
    padded[lead : lead + units.numel()] = _readings(units).to(torch.int64)
    table = torch.from_numpy(KEYS.astype("int64")).to(units.device)
    partial = (padded.view(blocks, BLOCK, 4) * table).sum(1)
    return (partial * _block_keys(first // BLOCK, blocks, seed, units.device)).sum(0)


def _block_keys(first: int, blocks: int, seed: Seed, device: torch.device) -> Tensor:
    index = torch.arange(blocks, dtype=torch.int64, device=device)
    y = _mix64(index + _signed(seed.a + first))
    z = _mix64(index + _signed(seed.b + first))
    low = 0xFFFFFFFF
    return torch.stack([y & low, _shift(y, 32), z & low, _shift(z, 32)], dim=1) | 1


def _mix64(v: Tensor) -> Tensor:
    """mix64 of docs/protocol.md on int64, whose products wrap mod 2**64 as the unsigned ones do."""
    z = v * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(v: Tensor, by: int) -> Tensor:
    """Logical shift right of int64."""
    return (v >> by) & ((1 << (64 - by)) - 1)


def _signed(v: int) -> int:
    v &= _MASK64
    return v - (1 << 64) if v >> 63 else v
