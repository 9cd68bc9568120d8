"""The kernels in Triton, for GPUs that the CUDA library is not for.

Does not wait for the device. Runs on the CPU only under Triton's interpreter (TRITON_INTERPRET=1), as its tests do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from vllm_delta_sync.kernels import places
from vllm_delta_sync.kernels.patch import Prepared
from vllm_delta_sync.native.portable_hash import BLOCK, KEYS, LANES
from vllm_delta_sync.native.types import I64, Seed

TILE = 1024  # elements per program of a commit
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


def place(targets: Sequence[Tensor], segments: I64) -> I64:
    """A run of at most TILE elements for each program."""
    return places.runs(targets, segments, TILE)


def write(patch: Prepared) -> Tensor:
    """Commit a patch placed in runs; returns what `kernels.ops.scatter_` does.

    One kernel compares everything, a second writes unless the first found something; nothing comes after that could
    fail. Columns may be in pinned memory of the host.
    """
    from vllm_delta_sync.kernels import triton_kernels as kernels

    if not len(patch.places):
        return torch.tensor(-1, dtype=torch.int64)
    first = torch.full((), -1, dtype=torch.int64, device=patch.targets[0].device)
    offsets, outcome = patch.offsets.view(torch.int32), first.view(torch.uint64)
    grid = (len(patch.places),)
    kernels.compare[grid](patch.places, offsets, patch.expected, outcome, TILE)
    kernels.write[grid](patch.places, offsets, patch.values, outcome, TILE)
    return first


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
