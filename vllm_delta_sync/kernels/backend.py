"""Which implementation of the kernels serves a device, and why; and the calls on it that take and return host data.

Does not decide per call: a backend is selected once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync import native
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels import cpu, cuda, reference
from vllm_delta_sync.native import cuda as native_cuda
from vllm_delta_sync.native.library import Loaded
from vllm_delta_sync.native.types import I64, U32, Bits, Seed

Policy = Literal["auto", "native", "reference"]
Scatter = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor], Tensor]
StateHash = Callable[[Tensor, int, Seed], Tensor]


class Patch(Protocol):
    """An update in host memory; the columns are those of the `scatter_` op."""

    @property
    def segments(self) -> I64: ...
    @property
    def offsets(self) -> U32: ...
    @property
    def expected(self) -> Bits: ...
    @property
    def values(self) -> Bits: ...


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels for one kind of device."""

    name: str  # "native (avx2)", "native (cuda)" or "reference (torch)"
    reason: str  # why this one
    device: torch.device
    scatter_: Scatter  # the op of that name, on tensors of `device`
    state_hash: StateHash

    def scatter(self, targets: Sequence[Tensor], patch: Patch) -> int:
        """Write a patch over targets that hold `expected`, or nothing at all.

        Returns −1, or the index of the first element that is not as expected; then nothing was written. Waits for the
        result, so that whoever reads the targets afterwards, on any stream, sees it.
        """
        integer = targets[0].dtype if targets else torch.int16
        columns = [torch.from_numpy(patch.segments), torch.from_numpy(patch.offsets.view(np.int32))]
        columns += [
            torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(integer) for bits in (patch.expected, patch.values)
        ]
        return int(self.scatter_(targets, *(column.to(self.device) for column in columns)))

    def hash(self, bits: Tensor, start: int, seed: Seed) -> U32:
        """Lanes u32 [4] of elements start … start+n−1; bits: a contiguous 1-D tensor of `device`."""
        return self.state_hash(bits, start, seed).cpu().numpy().astype(np.uint32)


def select(policy: Policy, device: torch.device | str, threads: int = 1) -> Backend:
    """The backend for a device.

    Args:
        policy: "auto" takes the fastest there is, "native" refuses to degrade, "reference" is plain torch.
        threads: CPU threads of one scatter.

    Raises:
        ConfigError: the policy is "native" and no native implementation can serve the device, or it is not a policy.
    """
    device = torch.device(device)
    if policy not in ("auto", "native", "reference"):
        raise ConfigError(f"kernel: {policy!r} is not one of auto, native, reference")
    if policy == "reference":
        return _reference(device, "asked for")
    if device.type == "cpu":
        if native.backend().startswith("native"):
            return _cpu(device, native.backend_reason(), threads)
        why = native.backend_reason()
    elif device.type == "cuda":
        loaded = _cuda_library()
        if loaded.library is not None:
            return _cuda(device, native_cuda.CudaLibrary(loaded))
        why = loaded.reason
    else:
        why = f"there is no native kernel for {device.type} devices"
    if policy == "native":
        raise ConfigError(f"kernel: native was asked for on {device}, but {why}; fix that or set `kernel: auto`")
    return _reference(device, why)


def _reference(device: torch.device, reason: str) -> Backend:
    return Backend("reference (torch)", reason, device, reference.scatter_, reference.state_hash)


def _cpu(device: torch.device, reason: str, threads: int) -> Backend:
    def scatter_(
        targets: Sequence[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor
    ) -> Tensor:
        return cpu.scatter_(targets, segments, offsets, expected, values, threads)

    return Backend(native.backend(), reason, device, scatter_, cpu.state_hash)


def _cuda(device: torch.device, library: native_cuda.CudaLibrary) -> Backend:
    def scatter_(
        targets: Sequence[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor
    ) -> Tensor:
        return cuda.scatter_(library, targets, segments, offsets, expected, values)

    def state_hash(bits: Tensor, start: int, seed: Seed) -> Tensor:
        return cuda.state_hash(library, bits, start, seed)

    return Backend("native (cuda)", library.path, device, scatter_, state_hash)


@cache
def _cuda_library() -> Loaded:
    return native_cuda.find()
