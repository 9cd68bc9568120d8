"""The kernels on CPU tensors through `native`.

Does not copy: tensors are handed over by address.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync import native
from vllm_delta_sync.kernels.patch import Prepared
from vllm_delta_sync.kernels.upload import SIGNED
from vllm_delta_sync.native.types import WIDTHS, Bits, Seed

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Bits:
    """A contiguous 1-D CPU tensor's elements as numpy unsigned integers, sharing its memory."""
    width = tensor.element_size()
    bits: Bits = tensor.detach().view(_INTEGERS[width]).numpy().view(WIDTHS[width])
    return bits


def write(patch: Prepared, threads: int) -> Tensor:
    """Commit a patch; returns what `kernels.ops.scatter_` does."""
    columns = (as_bits(column) for column in (patch.offsets, patch.expected, patch.values))
    index = native.scatter(patch.places.numpy(), *columns, threads=threads)
    return torch.tensor(index, dtype=torch.int64)


def diff(before: Tensor, after: Tensor, advance: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.ops`."""
    found = native.diff(as_bits(before), as_bits(after), advance=advance)
    positions = torch.from_numpy(found.positions.view(np.int32))
    old, new = (torch.from_numpy(bits.view(SIGNED[bits.itemsize])) for bits in (found.old, found.new))
    return positions, old, new


def state_hash(bits: Tensor, start: int, seed: Seed) -> Tensor:
    """See `kernels.ops`."""
    return torch.from_numpy(native.hash_run(as_bits(bits), start, seed).astype(np.int64))
