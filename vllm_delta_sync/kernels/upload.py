"""Copies rows of host memory to a device, by way of two pinned buffers that are kept.

Does not wait for the device, beyond a buffer that it still reads: the copies are the current stream's. Pinning memory
would hold up every stream of a device, so it is done once.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUFFER_BYTES = 8 << 20  # of each of the two: large enough for the bus, and it cannot be paged out

SIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),  # torch's bytes are unsigned
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


class Uploader:
    """The buffers of one device. Threads may share it, also on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._buffers = torch.empty((2, BUFFER_BYTES), dtype=torch.uint8, pin_memory=on_gpu)
        # Blocking: whoever waits for one sleeps, and leaves the core to the threads that serve.
        self._read = [torch.cuda.Event(blocking=True) for _ in self._buffers] if on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._lock = threading.Lock()

    def copy(self, host: NDArray[Any], target: Tensor) -> None:
        """Enqueue the copy of contiguous elements to as many bytes of a device; `host` may change on return."""
        source, to = torch.from_numpy(host.reshape(-1).view(np.uint8)), target.reshape(-1).view(torch.uint8)
        for at in range(0, source.numel(), BUFFER_BYTES):
            some = source[at : at + BUFFER_BYTES]
            with self._lock:
                self._turn ^= 1
                buffer = self._buffers[self._turn, : some.numel()]
                if self._read:
                    self._read[self._turn].synchronize()
                buffer.copy_(some)
                to[at : at + BUFFER_BYTES].copy_(buffer, non_blocking=bool(self._read))
                if self._read:
                    # Where it was copied, which need not be the current device's stream.
                    self._read[self._turn].record(torch.cuda.current_stream(self._device))


@cache
def uploader(device: torch.device) -> Uploader:
    """The one that a device has."""
    return Uploader(device)


def to_device(host: NDArray[Any], device: torch.device) -> Tensor:
    """Contiguous integers [n, …] of 1, 2, 4 or 8 bytes as integers of a device: the host's own memory on a CPU."""
    integers = as_integers(host)
    if device.type != "cuda":
        return integers.to(device)
    copy = torch.empty(integers.shape, dtype=integers.dtype, device=device)
    uploader(device).copy(host, copy)
    return copy


def pinned(host: NDArray[Any]) -> Tensor:
    """The same in pinned memory of the host, which a GPU's kernels read across the bus."""
    return as_integers(host).pin_memory()


def as_integers(host: NDArray[Any]) -> Tensor:
    """The same elements as torch's integers, in the same memory."""
    return torch.from_numpy(host.view(SIGNED[host.itemsize]))
