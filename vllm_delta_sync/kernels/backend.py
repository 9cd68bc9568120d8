"""Which implementation of the kernels serves a device, and why; and the calls on it that take or return host data.

Does not decide per call: a backend is selected once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_delta_sync import native
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels import cpu, ctx, cuda, places, reference, triton
from vllm_delta_sync.kernels.arena import Arena
from vllm_delta_sync.kernels.ctx import CodedBlock, Decoded
from vllm_delta_sync.kernels.patch import Patch, Prepared
from vllm_delta_sync.kernels.upload import as_integers, pinned, to_device, uploader
from vllm_delta_sync.native import cuda as native_cuda
from vllm_delta_sync.native.library import Loaded
from vllm_delta_sync.native.types import I64, U32, Seed

Policy = Literal["auto", "native", "triton", "reference"]
Place = Callable[[Sequence[Tensor], I64], I64]
Write = Callable[[Prepared], Tensor]
StateHash = Callable[[Tensor, int, Seed], Tensor]
Diff = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
DecodeTiles = Callable[[Sequence[CodedBlock]], list[Decoded | None]]


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels for one kind of device."""

    name: str  # "native (avx2)", "native (cuda)", "triton" or "reference (torch)"
    reason: str  # why this one
    device: torch.device
    place: Place  # from targets and segments of the `scatter_` op, where elements go: `Prepared.places`
    write: Write  # commits a patch; returns what `scatter_` does, without waiting for it
    state_hash: StateHash  # the op of that name, on tensors of `device`; so is the next
    diff: Diff
    decode_tiles: DecodeTiles | None  # `kernels.ctx.decode`; None where the host decodes

    def prepare(self, targets: Sequence[Tensor], patch: Patch, arena: Arena | None) -> Prepared:
        """Bring a patch of targets to where the kernels read it: into an arena; on a CPU, without one, it stays put.

        A column for which there is no room goes into pinned memory of the host, and the commit takes as long as the bus
        does. Waits until everything is there, so that whoever scatters it may do so on any stream.
        """
        bring: Callable[[NDArray[Any]], Tensor]
        if arena is None:
            assert self.device.type == "cpu", f"a patch for {self.device} needs room there"
            bring = as_integers
        else:
            bring = partial(self._into, arena)
        prepared = Prepared(
            targets=tuple(targets),
            places=bring(self.place(targets, patch.segments)),
            offsets=bring(patch.offsets),
            expected=bring(patch.expected),
            values=bring(patch.values),
            turn=0 if arena is None else arena.turn,
        )
        self.settle()
        return prepared

    def _into(self, arena: Arena, column: NDArray[Any]) -> Tensor:
        integers = as_integers(column)
        room = arena.cut(tuple(integers.shape), integers.dtype)
        if room is None:
            return pinned(column)
        uploader(self.device).copy(column, room)
        return room

    def settle(self) -> None:
        """Wait for what the current stream was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def scatter_(
        self, targets: Sequence[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor
    ) -> Tensor:
        """The op of that name; waits for segments, which are placed on the host."""
        places = to_device(self.place(targets, segments.cpu().numpy()), self.device)
        return self.write(Prepared(tuple(targets), places, offsets, expected, values))

    def scatter(self, patch: Prepared) -> int:
        """Write a patch over targets that hold `expected`, or nothing at all.

        Returns −1, or the index of the first element that is not as expected; then nothing was written. Waits for the
        result, so that whoever reads the targets afterwards, on any stream, sees it.
        """
        return int(self.write(patch))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it the device works on a stream of its own: it does not wait for the model's steps, nor they for it.

        Nothing else writes what is read there: a step writes no weights, and a commit is over when `scatter` returns.
        """
        if self.device.type != "cuda":
            yield
            return
        # The device first: a thread begins with device 0, and leaving a stream of another device for one of that would
        # open a context there, which takes hundreds of megabytes of each rank.
        with torch.cuda.device(self.device), torch.cuda.stream(_side_stream(self.device)):
            yield

    def hash(self, bits: Tensor, start: int, seed: Seed) -> U32:
        """Lanes u32 [4] of elements start … start+n−1; bits: a contiguous 1-D tensor of `device`."""
        return self.state_hash(bits, start, seed).cpu().numpy().astype(np.uint32)


def select(policy: Policy, device: torch.device | str, threads: int = 1) -> Backend:
    """The backend for a device.

    Args:
        policy: "auto" takes the fastest there is, "native" and "triton" refuse to degrade, "reference" is plain torch.
        threads: CPU threads of one scatter.

    Raises:
        ConfigError: the policy is "native" or "triton" and that cannot serve the device, or it is not a policy.
    """
    device = torch.device(device)
    if policy not in get_args(Policy):
        raise ConfigError(f"kernel: {policy!r} is not one of {', '.join(get_args(Policy))}")
    if policy == "reference":
        return _reference(device, "asked for")
    makers: dict[Policy, Callable[[], Backend | str]] = {
        "native": lambda: _native(device, threads),
        "triton": lambda: _triton(device),
    }
    missing: list[str] = []
    for name, make in makers.items():
        if policy in ("auto", name):
            made = make()
            if isinstance(made, Backend):
                return replace(made, reason="; ".join([*missing, made.reason]))
            missing.append(made)
    why = "; ".join(missing)
    if policy != "auto":
        raise ConfigError(f"kernel: {policy} was asked for on {device}, but {why}; fix that or set `kernel: auto`")
    return _reference(device, why)


def _native(device: torch.device, threads: int) -> Backend | str:
    """The C or CUDA library, or why it cannot serve this device."""
    if device.type == "cpu":
        if native.backend().startswith("native"):
            return _cpu(device, native.backend_reason(), threads)
        return native.backend_reason()
    if device.type == "cuda" and torch.version.cuda is not None:  # AMD's GPUs are "cuda" devices to torch, too
        loaded = _cuda_library()
        if loaded.library is None:
            return loaded.reason
        library = native_cuda.CudaLibrary(loaded)
        index = torch.cuda.current_device() if device.index is None else device.index
        if not library.cooperates(index):
            return (
                f"{device} cannot launch a grid whose blocks wait for each other, as a commit does, or "
                f"{library.path} has no code for it"
            )
        return _cuda(device, library)
    return f"there is no native kernel for {device.type} devices"


def _triton(device: torch.device) -> Backend | str:
    """Triton, or why it cannot serve this device."""
    why_not = triton.why_not(device)
    if why_not:
        return why_not

    def write(patch: Prepared) -> Tensor:
        with _current(device):
            return triton.write(patch)

    def state_hash(bits: Tensor, start: int, seed: Seed) -> Tensor:
        with _current(device):
            return triton.state_hash(bits, start, seed)

    return Backend("triton", f"on {device.type}", device, triton.place, write, state_hash, reference.diff, None)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its arguments lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _reference(device: torch.device, reason: str) -> Backend:
    return Backend(
        "reference (torch)",
        reason,
        device,
        reference.place,
        reference.write,
        reference.state_hash,
        reference.diff,
        None,
    )


def _cpu(device: torch.device, reason: str, threads: int) -> Backend:
    def write(patch: Prepared) -> Tensor:
        return cpu.write(patch, threads)

    return Backend(native.backend(), reason, device, places.rows, write, cpu.state_hash, cpu.diff, None)


def _cuda(device: torch.device, library: native_cuda.CudaLibrary) -> Backend:
    def write(patch: Prepared) -> Tensor:
        with torch.cuda.device(device):
            return cuda.write(library, patch, device, torch.cuda.current_stream(device).cuda_stream)

    def state_hash(bits: Tensor, start: int, seed: Seed) -> Tensor:
        return cuda.state_hash(library, bits, start, seed)

    def diff(before: Tensor, after: Tensor, advance: bool) -> tuple[Tensor, Tensor, Tensor]:
        with torch.cuda.device(device):
            return cuda.diff(library, before, after, advance, torch.cuda.current_stream(device).cuda_stream)

    def decode_tiles(blocks: Sequence[CodedBlock]) -> list[Decoded | None]:
        with torch.cuda.device(device):
            return ctx.decode(library, blocks, torch.cuda.current_stream(device).cuda_stream)

    return Backend("native (cuda)", library.path, device, places.rows, write, state_hash, diff, decode_tiles)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@cache
def _cuda_library() -> Loaded:
    return native_cuda.find()
