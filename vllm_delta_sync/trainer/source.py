"""A trainer's weights as named torch tensors, and their elements as the bits that the log publishes.

Does not compare, keep or send anything; does not gather sharded tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.errors import BaseMismatch, ConfigError
from vllm_delta_sync.kernels.dtypes import BY_NAME, NAMES
from vllm_delta_sync.wire import dtypes
from vllm_delta_sync.wire.tensors import TensorSpec

Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger]

_CASTABLE = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
# Elements that torch casts in the calling thread: its pool of threads takes over at 2**15. Blocks are cast by several
# threads of ours at once; a pool for each would oversubscribe the cores, which costs far more than it gains.
_SERIAL = 63 << 9
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorSpec:
    """How a tensor of the base is published: fp32 and fp64 as `dtype` (None: as they are), all others as they are.

    Raises ConfigError for a tensor without bits of its own here (meta, sparse, sharded) or a dtype that the log does
    not know.
    """
    _refuse_unreadable(name, tensor)
    published = dtype if dtype is not None and tensor.dtype in (torch.float32, torch.float64) else tensor.dtype
    if published not in NAMES:
        raise ConfigError(f"{name}: {published} cannot be published; the log knows {', '.join(map(str, NAMES))}")
    return TensorSpec(name, NAMES[published], tuple(tensor.shape))


def check(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Raise BaseMismatch unless the tensor can be published as the base's tensor `spec`."""
    _refuse_unreadable(spec.name, tensor)
    if tuple(tensor.shape) != spec.shape:
        raise BaseMismatch(
            f"{spec.name}: has shape {list(tensor.shape)}, the base {list(spec.shape)}; a run keeps the shapes of its "
            "base: publish to a new run with Publisher.open(..., base=...)"
        )
    wanted = BY_NAME[spec.dtype]
    if tensor.dtype != wanted and not {tensor.dtype, wanted} <= _CASTABLE:
        raise BaseMismatch(
            f"{spec.name}: is {tensor.dtype}, the base {wanted}; only 16 to 64-bit floating-point tensors are cast"
        )


def state_of(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of a module or mapping by name, tied names included, in the source's order.

    A module's extra state that is no tensor has nothing to publish and is left out. Raises ConfigError when a mapping
    holds anything but tensors.
    """
    if isinstance(source, torch.nn.Module):
        state = source.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in source.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ConfigError(f"weights must map names to tensors, but {name!r} is a {type(value).__name__}")
    return {name: value.detach() for name, value in source.items()}


def untie(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a state into one name per storage (the first) and the aliases: other name → first name."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state.items():
        owner = first.setdefault(_identity(tensor, name), name)
        if owner == name:
            tensors[name] = tensor
        else:
            aliases[name] = owner
    return tensors, aliases


def pair_up(source: Weights, names: Collection[str], aliases: Mapping[str, str]) -> Iterable[tuple[str, torch.Tensor]]:
    """(name in the base, tensor) of everything in `source` that the base has.

    Args:
        source: a module, a mapping, or (name, tensor) pairs, which are read one by one and may be made on the way.
        names: the base's names.
        aliases: names that the base's model tied → the base's name for them.

    A name may come twice, once for each of its aliases: the caller must see that they are identical. A module's buffers
    that the base lacks are left out, as are names that share the memory of one in the base. Raises BaseMismatch for any
    other name that the base lacks: at once for a module or mapping, else when its turn comes.
    """
    if not isinstance(source, torch.nn.Module | Mapping):
        return _pair_up_stream(source, names, aliases)
    state = state_of(source)
    buffers = {name for name, _ in source.named_buffers()} if isinstance(source, torch.nn.Module) else set()
    held = {_identity(tensor, name) for name, tensor in state.items() if name in names}
    pairs = []
    unknown = []
    for name, tensor in state.items():
        if name in names:
            pairs.append((name, tensor))
        elif _identity(tensor, name) in held or name in buffers:
            continue
        elif name in aliases:
            pairs.append((aliases[name], tensor))
        else:
            unknown.append(name)
    if unknown:
        raise _lacks(unknown, names)
    return pairs


def _pair_up_stream(
    source: Iterable[tuple[str, torch.Tensor]], names: Collection[str], aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source:
        owner = aliases.get(name, name)
        if owner not in names:
            raise _lacks([name], names)
        yield owner, tensor.detach()


def _lacks(unknown: list[str], names: Collection[str]) -> BaseMismatch:
    text = f"the base has no tensor {', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''}"
    wrapped = next((p for p in ("module.", "_orig_mod.") if unknown[0].removeprefix(p) in names), None)
    if wrapped:
        return BaseMismatch(f"{text}, but has it without {wrapped!r}: publish the model inside the wrapper")
    return BaseMismatch(f"{text}; publish only what the base has, or open a new run on a base that has it")


def finish_writes(tensor: torch.Tensor) -> None:
    """Wait for what the calling thread's stream still has to write to a CUDA tensor; nothing to do for any other.

    For a tensor that other threads are to read: they do so on streams of their own, which do not wait for the caller's.
    """
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()


def view_bits(tensor: torch.Tensor, spec: TensorSpec) -> Bits | None:
    """The bits uW[numel] of a tensor as they lie in host memory; None when only `read_bits` can read them."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
    return _as_bits(tensor.reshape(-1), spec) if plain and tensor.dtype == BY_NAME[spec.dtype] else None


def read_bits(tensor: torch.Tensor, spec: TensorSpec, start: int, count: int, into: Scratch | None = None) -> Bits:
    """Copy elements start … start+count−1 (row-major) to the host, cast as torch casts, as bits uW[count].

    Any strides and any device. Allocates O(count) on the tensor's device, and on the host unless `into` is given: then
    the bits are valid until it is next used.
    """
    dtype = BY_NAME[spec.dtype]
    out = into.take(dtype, count) if into else torch.empty(count, dtype=dtype)
    if tensor.device.type == "cpu":
        for at in range(0, count, _SERIAL):
            _fill(out[at : at + _SERIAL], tensor, start + at)
    else:  # cast before the transfer
        there = torch.empty(count, dtype=dtype, device=tensor.device)
        _fill(there, tensor, start)
        out.copy_(there)
    return _as_bits(out, spec)


class Scratch(threading.local):
    """Host memory to read bits into, kept from one call to the next: touching new pages costs more than the cast."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """`count` elements, of no content yet; the calling thread's own until it asks again."""
        held = self._held.get(dtype)
        if held is None or held.numel() < count:
            held = self._held[dtype] = torch.empty(count, dtype=dtype)
        return held[:count]


def _fill(out: torch.Tensor, tensor: torch.Tensor, start: int) -> None:
    """Cast the elements from `start` on into the 1-d `out`, without a contiguous copy of more than `out` holds."""
    if out.numel() == 0:
        return
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[start : start + out.numel()])
        return
    row = tensor.numel() // tensor.shape[0]
    first, offset = divmod(start, row)
    if offset or out.numel() < row:  # begins inside a row, or ends in the one it begins in
        head = min(row - offset, out.numel())
        _fill(out[:head], tensor[first], offset)
        out, first = out[head:], first + 1
    rows = out.numel() // row
    out[: rows * row].view(rows, *tensor.shape[1:]).copy_(tensor[first : first + rows])
    if out.numel() > rows * row:  # ends inside a row
        _fill(out[rows * row :], tensor[first + rows], 0)


def _as_bits(flat: torch.Tensor, spec: TensorSpec) -> Bits:
    bits: Bits = flat.view(_INTEGERS[spec.width]).numpy().view(dtypes.by_name(spec.dtype).bits)
    return bits


def _identity(tensor: torch.Tensor, name: str) -> object:
    """Equal for two tensors exactly when they are one view of the same memory; without memory, equal to no other."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.is_meta:
        return name
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name}: is a {type(tensor).__name__}, not a tensor")
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(f"{name}: is sharded over a device mesh; pass the gathered tensor, tensor.full_tensor()")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ConfigError(
            f"{name}: has no dense memory (device {tensor.device}, {tensor.layout}); materialise it first"
        )
