"""The `torch.ops.vllm_delta_sync` operators: one schema each, checked once, whatever the backend.

    scatter_(Tensor(a!)[] targets, Tensor segments, Tensor offsets, Tensor expected, Tensor values) -> Tensor
        targets: flat 1-D tensors of one integer dtype, views of live storages. segments i64 [S, 4]: rows (target index,
        base element, first, last), ascending: element i of first … last−1 goes to targets[t][base + offsets[i]].
        offsets: u32 [n], or its bits as int32. expected, values: [n], of the targets' dtype. Targets are distinct.
        Waits for segments, which are read on the host. Returns i64 []: −1, or the index of the first element whose live
        bits are not `expected`; then no live bit differs from before the call.
    state_hash(Tensor bits, int start, int seed_a, int seed_b) -> Tensor
        bits: contiguous [n], elements start … start+n−1 of a tensor. Seeds: 64 bits, read as unsigned.
        Returns i64 [4]: the lanes of docs/protocol.md, each below 2**32.
    diff(Tensor(a!) before, Tensor after, bool advance) -> (Tensor, Tensor, Tensor)
        before, after: contiguous [n] of one integer dtype, n < 2**31. Returns what differs: positions i32 [m],
        ascending, old and new bits [m]. With `advance`, the new bits are written to `before`.

Does not check offsets against the targets' sizes: whoever staged them did.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_delta_sync.kernels.backend import Backend, select
from vllm_delta_sync.native.types import MAX_COUNT, Seed

_MASK64 = (1 << 64) - 1


@cache
def _backend(device: torch.device) -> Backend:
    return select("auto", device)


def check_scatter(targets: list[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor) -> None:
    """Refuse arguments that break the schema above: TypeError for dtypes, ValueError for shapes, devices and ranges."""
    if any(target.dtype != values.dtype for target in targets) or expected.dtype != values.dtype:
        raise TypeError(f"targets, expected and values must share one dtype, got values of {values.dtype}")
    if values.is_floating_point() or segments.dtype != torch.int64 or offsets.dtype not in (torch.int32, torch.uint32):
        raise TypeError(
            f"want integer views, int64 segments, 32-bit offsets; got {values.dtype}, {segments.dtype}, {offsets.dtype}"
        )
    n = values.numel()
    if values.shape != (n,) or expected.shape != (n,) or offsets.shape != (n,) or segments.shape[1:] != (4,):
        raise ValueError(
            f"want [n], [n], [n] and [S, 4], got {offsets.shape}, {expected.shape}, {values.shape}, {segments.shape}"
        )
    tensors = [*targets, segments, offsets, expected, values]
    if any(not tensor.is_contiguous() or tensor.device != values.device for tensor in tensors):
        raise ValueError("all tensors must be contiguous and on one device")


def _scatter(targets: list[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor) -> Tensor:
    check_scatter(targets, segments, offsets, expected, values)
    return _backend(values.device).scatter_(targets, segments, offsets, expected, values)


def _state_hash(bits: Tensor, start: int, seed_a: int, seed_b: int) -> Tensor:
    if bits.ndim != 1 or not bits.is_contiguous() or start < 0:
        raise ValueError(f"want a contiguous row and start ≥ 0, got shape {bits.shape} and start {start}")
    return _backend(bits.device).state_hash(bits, start, Seed(seed_a & _MASK64, seed_b & _MASK64))


def _diff(before: Tensor, after: Tensor, advance: bool) -> tuple[Tensor, Tensor, Tensor]:
    if before.dtype != after.dtype or before.is_floating_point():
        raise TypeError(f"want integer views of one dtype, got {before.dtype} and {after.dtype}")
    n = before.numel()
    if before.shape != (n,) or after.shape != (n,) or not before.is_contiguous() or not after.is_contiguous():
        raise ValueError(f"want two contiguous rows of one length, got {before.shape} and {after.shape}")
    if n >= MAX_COUNT or before.device != after.device:
        raise ValueError(f"want less than 2**31 elements on one device, got {n} on {before.device}, {after.device}")
    return _backend(before.device).diff(before, after, advance)


def _scatter_shape(
    targets: list[Tensor], segments: Tensor, offsets: Tensor, expected: Tensor, values: Tensor
) -> Tensor:
    return segments.new_empty(())


def _state_hash_shape(bits: Tensor, start: int, seed_a: int, seed_b: int) -> Tensor:
    return bits.new_empty(4, dtype=torch.int64)


_SCATTER = "scatter_(Tensor(a!)[] targets, Tensor segments, Tensor offsets, Tensor expected, Tensor values) -> Tensor"
_STATE_HASH = "state_hash(Tensor bits, int start, int seed_a, int seed_b) -> Tensor"
_DIFF = "diff(Tensor(a!) before, Tensor after, bool advance) -> (Tensor, Tensor, Tensor)"
_NAMESPACE: Any = torch.library.Library  # untyped in torch
_LIBRARY = _NAMESPACE("vllm_delta_sync", "DEF")  # the operators live as long as this object
_OPERATORS: tuple[tuple[str, Callable[..., object], Callable[..., Tensor] | None], ...] = (
    (_SCATTER, _scatter, _scatter_shape),
    (_STATE_HASH, _state_hash, _state_hash_shape),
    (_DIFF, _diff, None),  # how much differs only the data tell
)
for _schema, _compute, _shape in _OPERATORS:
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _compute, "CPU")
    _LIBRARY.impl(_name, _compute, "CUDA")
    if _shape is not None:
        _LIBRARY.impl(_name, _shape, "Meta")
