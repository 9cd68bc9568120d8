"""Memory of a device, set aside once, of which the columns of a patch are cut.

Does not grow, and gives nothing back while it lives: what it holds is bounded, and nobody else gets it.
"""

from __future__ import annotations

import math

import torch

ALIGNED = 256  # bytes: what a device's allocator gives, and reads of neighbouring threads come together by


class Arena:
    """Room for one patch after the other.

    Args:
        nbytes: all there will be.

    Raises:
        torch.OutOfMemoryError: the device has not as much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0
        self.turn = 0  # how often it was cleared

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def cut(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """A contiguous tensor that holds anything, or None where there is no room for it."""
        wanted = math.prod(shape) * dtype.itemsize
        begin = -(-self._used // ALIGNED) * ALIGNED
        if begin + wanted > self.nbytes:
            return None
        self._used = begin + wanted
        return self._memory[begin : self._used].view(dtype).view(shape)

    def clear(self) -> None:
        """Take back all that was cut: what is cut later may lie in its place, so it is not to be used any more."""
        self._used = 0
        self.turn += 1
