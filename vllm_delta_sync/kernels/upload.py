"""Copies rows of host memory to a device, by way of pinned memory.

Does not wait for the device: the copies are the current stream's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PINNED_BYTES = 16 << 20  # pinned at a time: it cannot be paged out, and is kept by torch for the next copies

SIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),  # torch's bytes are unsigned
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


def to_device(host: NDArray[Any], device: torch.device) -> Tensor:
    """Contiguous integers [n, …] of 1, 2, 4 or 8 bytes as integers of a device: the host's own memory on a CPU."""
    integers = _integers(host)
    if device.type != "cuda":
        return integers.to(device)
    copy = torch.empty(integers.shape, dtype=integers.dtype, device=device)
    each = max(1, PINNED_BYTES // max(1, host.nbytes // max(1, len(host))))
    for at in range(0, len(host), each):
        copy[at : at + each].copy_(integers[at : at + each].pin_memory(), non_blocking=True)
    return copy


def pinned(host: NDArray[Any]) -> Tensor:
    """The same in pinned memory of the host, which a GPU's kernels read across the bus."""
    return _integers(host).pin_memory()


def _integers(host: NDArray[Any]) -> Tensor:
    return torch.from_numpy(host.view(SIGNED[host.itemsize]))
