"""Watches a model load meta tensors and records which view of which one is copied to which view of live memory.

Does not let anything reach live memory while it is active, and does not judge what it saw: `layout.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vllm_delta_sync.errors import UnsupportedLayout
from vllm_delta_sync.serving.affine import Box, View

_aten = torch.ops.aten
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}
_DUPLICATES = {_aten.clone.default, _aten._to_copy.default}


@dataclass(frozen=True, slots=True)
class Copy:
    """`target.copy_(source)` from a view of a checkpoint tensor into a view of a live storage."""

    tensor: str
    source: View
    source_dtype: torch.dtype
    storage: int
    target: View
    target_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Any other write to a live storage. `reads` are the live storages that its value was computed from."""

    storage: int
    target: View
    what: str
    reads: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Alias:
    tensor: str
    shift: int  # element x of the storage is element x + shift of the checkpoint tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active on this thread, every write to memory that was not allocated under it is recorded and dropped.

    Args:
        sources: checkpoint name -> meta tensor, contiguous, each with a storage of its own.
        live: key (`storage_key`) of each live storage -> its index.

    Attributes:
        events: the writes to live storages, in order.
        problems: checkpoint name -> why its way into live memory is not a plain copy.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], live: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Copy | Overwrite] = []
        self.problems: dict[str, str] = {}
        self._live = live
        self._sources = sources
        self._aliases = {storage_key(tensor): _Alias(name, 0) for name, tensor in sources.items()}
        self._constant: set[str] = set()  # tensors that the loader has replaced by a constant on this rank
        self._scratch: set[int] = set()  # storages allocated under the mode
        self._held: list[Any] = []  # those that matter and cost nothing: none of their keys is used twice
        self._names: dict[int, frozenset[str]] = {}  # scratch computed from these checkpoint tensors
        self._reads: dict[int, frozenset[int]] = {}  # scratch computed from these live storages

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written:
            return self._write(func, args, kwargs, written)
        inputs = _tensors(*args, *kwargs.values())
        names, reads = self._origins(inputs)
        on_meta = [tensor.is_meta for tensor in inputs]
        if any(on_meta) and (kwargs or not all(on_meta)):
            args, kwargs = _as_meta(args, kwargs)
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        if names and not outputs:
            raise UnsupportedLayout(f"the loader looks at values of {', '.join(sorted(names))} ({func._schema.name})")
        self._note_outputs(func, inputs, outputs, names, reads)
        return out

    def _origins(self, tensors: Sequence[torch.Tensor]) -> tuple[frozenset[str], frozenset[int]]:
        """Checkpoint tensors and live storages that any of these depends on."""
        names: set[str] = set()
        reads: set[int] = set()
        for key in map(storage_key, tensors):
            if key in self._aliases:
                names.add(self._aliases[key].tensor)
            elif key in self._live:
                reads.add(self._live[key])
            names |= self._names.get(key, frozenset())
            reads |= self._reads.get(key, frozenset())
        return frozenset(names), frozenset(reads)

    def _note_outputs(
        self,
        func: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        names: frozenset[str],
        reads: frozenset[int],
    ) -> None:
        before = {storage_key(tensor) for tensor in inputs}
        for out in outputs:
            key = storage_key(out)
            if key in before and func is not _aten.lift_fresh.default:
                continue  # a view
            alias = self._aliases.get(storage_key(inputs[0])) if func in _DUPLICATES else None
            self._scratch.add(key)
            self._aliases.pop(key, None)  # of a storage that is gone and had the same key
            self._names[key], self._reads[key] = names, reads
            if out.is_meta:
                self._held.append(out.untyped_storage())
            if alias is not None and _same_order(inputs[0], out):
                self._aliases[key] = _Alias(alias.tensor, _view(inputs[0]).offset + alias.shift)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
        inputs = _tensors(*args, *kwargs.values())
        values = [tensor for tensor in inputs if not any(tensor is target for target in written)]
        names, reads = self._origins(values)
        for target in written:
            self._record(func, target, values, names, reads)
        if all(storage_key(target) in self._scratch for target in written):
            if all(target.is_meta for target in written):
                args, kwargs = _as_meta(args, kwargs)
                return func(*args, **kwargs)
            if not any(tensor.is_meta for tensor in inputs):
                return func(*args, **kwargs)
        # A write to live memory, or of values that do not exist, only leaves its trace.
        if not func._schema.returns:
            return None
        return written[0] if len(func._schema.returns) == 1 else tuple(written)

    def _record(
        self,
        func: Any,
        target: torch.Tensor,
        values: Sequence[torch.Tensor],
        names: frozenset[str],
        reads: frozenset[int],
    ) -> None:
        key, what = storage_key(target), func._schema.name
        if key in self._scratch:
            self._aliases.pop(key, None)
            self._names[key] |= names
            self._reads[key] |= reads
        elif key in self._aliases:
            self._change_source(func, self._aliases[key], target, names)
        elif func is _aten.copy_.default and values and storage_key(values[0]) in self._aliases:
            self._copy(target, values[0], self._aliases[storage_key(values[0])])
        else:
            for name in names:
                self.problems.setdefault(name, f"its elements are computed, not copied, on their way ({what})")
            self._overwrite(target, what, reads)

    def _change_source(self, func: Any, alias: _Alias, target: torch.Tensor, names: frozenset[str]) -> None:
        """Ranks that must not add a bias again zero the checkpoint tensor: here it is a constant, held elsewhere."""
        if func in _FILLS and not names and target.numel() == self._sources[alias.tensor].numel():
            self._constant.add(alias.tensor)
        else:
            self.problems.setdefault(alias.tensor, f"the loader changes it in place ({func._schema.name})")

    def _copy(self, target: torch.Tensor, source: torch.Tensor, alias: _Alias) -> None:
        storage = self._live.get(storage_key(target))
        if alias.tensor in self._constant:
            self._overwrite(target, "a copy of a constant", frozenset())
        elif storage is None:
            self.problems.setdefault(alias.tensor, "it is copied to memory that is no parameter or buffer of the model")
        elif source.dtype != self._sources[alias.tensor].dtype:
            self.problems.setdefault(alias.tensor, f"it is read as {source.dtype}, which is not its type")
        elif target.numel():
            view = _view(source)
            moved = View(view.offset + alias.shift, view.sizes, view.strides)
            self.events.append(Copy(alias.tensor, moved, source.dtype, storage, _view(target), target.dtype))

    def _overwrite(self, target: torch.Tensor, what: str, reads: frozenset[int]) -> None:
        storage = self._live.get(storage_key(target))
        if storage is not None and target.numel():
            self.events.append(Overwrite(storage, _view(target), what, reads))


def storage_key(tensor: torch.Tensor) -> int:
    """What all views of one storage have in common, also on the meta device, where every address is 0."""
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))


def _tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments or results, which nest in lists and tuples only."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(*value)
    return found


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that the op's schema says it writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return _tensors(*[args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)])


def _same_order(source: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a duplicate holds the same elements at the same distances, without gaps."""
    if source.dtype != out.dtype or source.stride() != out.stride() or not source.numel():
        return False
    try:
        box = Box.of(_view(source))
    except UnsupportedLayout:
        return False
    return box.end - box.offset == box.numel


def _as_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for an op on shapes only: what is computed from a meta tensor stays one, wherever it is moved."""
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    return args, kwargs
