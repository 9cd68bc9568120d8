"""The kernels in Triton, for GPUs that the CUDA library is not for.

Does not wait for the device. Runs on the CPU only under Triton's interpreter (TRITON_INTERPRET=1), as its tests do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from vllm_delta_sync.native.portable_hash import BLOCK, KEYS, LANES
from vllm_delta_sync.native.types import Seed

TILE = 1024  # elements per program of a scatter
MOST_PROGRAMS = 4096  # of a hash; each strides over the rest


def why_not(device: torch.device) -> str | None:
    """None when Triton can serve this device, else the reason why it cannot."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'vllm-delta-sync[triton]'"
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        return "triton compiles for GPUs only"
    if device.type == "meta":
        return "there is no memory to work on"
    return None


def scatter_(targets: Sequence[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor) -> Tensor:
    """See `kernels.ops`. One kernel compares everything, a second writes unless the first found something.

    Offsets, expected and values may be in pinned memory of the host.
    """
    from vllm_delta_sync.kernels import triton_kernels as kernels

    none = torch.iinfo(torch.int64).max
    first = torch.full((), none, dtype=torch.int64, device=segments.device)
    if values.numel() and len(segments):
        tiles = _tiles(targets, segments, values.numel())
        places = offsets.view(torch.int32)
        grid = (len(tiles),)
        kernels.compare[grid](tiles, places, expected, first, none, TILE)
        kernels.write[grid](tiles, places, values, first, none, TILE)
    return torch.where(first == none, -1, first)


def _tiles(targets: Sequence[Tensor], segments: Tensor, n: int) -> Tensor:
    """The segments cut into runs of at most TILE elements: int64 [P, 3] rows of (address, first, last).

    P is a bound that needs no look at the device's memory; rows beyond the last run are empty.
    """
    device = segments.device
    bases = torch.tensor([target.data_ptr() for target in targets], dtype=torch.int64, device=device)
    width = targets[0].element_size()
    address = bases[segments[:, 0]] + segments[:, 1] * width
    begin, end = segments[:, 2], segments[:, 3]
    ends = torch.cumsum((end - begin + TILE - 1) // TILE, 0)  # of each segment's runs
    run = torch.arange(n // TILE + len(segments), dtype=torch.int64, device=device)
    owner = torch.searchsorted(ends, run, right=True)
    used = owner < len(segments)
    owner = owner.clamp(max=len(segments) - 1)
    before = torch.where(owner > 0, ends[owner - 1], 0)
    first = begin[owner] + (run - before) * TILE
    last = torch.minimum(first + TILE, end[owner])
    return torch.stack([address[owner], first, torch.where(used, last, first)], dim=1)


def state_hash(bits: Tensor, start: int, seed: Seed) -> Tensor:
    """See `kernels.ops`."""
    from vllm_delta_sync.kernels import triton_kernels as kernels

    units = bits.view(torch.uint8) if bits.element_size() == 1 else bits.view(torch.int16)
    first = start * max(1, bits.element_size() // 2)
    lanes = torch.zeros(LANES, dtype=torch.int32, device=bits.device)
    if units.numel():
        blocks = (first % BLOCK + units.numel() + BLOCK - 1) // BLOCK
        numbers = torch.tensor([units.numel(), first, _signed(seed.a), _signed(seed.b)], device=bits.device)
        programs = min(blocks, MOST_PROGRAMS)
        kernels.state_hash[(programs,)](units, numbers, _keys(bits.device), lanes, blocks, programs, BLOCK)
    return lanes.to(torch.int64) & 0xFFFFFFFF


@cache
def _keys(device: torch.device) -> Tensor:
    """The fixed keys, lane by lane: int16 [4, 1024]."""
    return torch.from_numpy(KEYS.T.copy()).to(device)


def _signed(v: int) -> int:
    return v - (1 << 64) if v >> 63 else v
