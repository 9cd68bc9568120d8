"""Finds out where in this rank's live memory each checkpoint element lives, by watching the model's own loader.

Does not guess: a tensor that reaches memory in any way but a plain copy is named, with the reason. Changes no weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_delta_sync.errors import UnsupportedLayout
from vllm_delta_sync.kernels.dtypes import BY_NAME, NAMES
from vllm_delta_sync.serving.affine import Box, Region, compose, first_overlap
from vllm_delta_sync.serving.recorder import Copy, Overwrite, Recorder, storage_key
from vllm_delta_sync.wire.tensors import TensorSpec

_WIDENINGS = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}  # exact, and exactly undone


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One allocation that holds parameters or buffers of the model."""

    name: str  # of the first parameter or buffer that lives in it
    address: int  # of its first byte; 0 on the meta device
    dtype: str  # safetensors name
    numel: int  # elements in the whole allocation
    device: str  # such as "cpu" or "cuda:0"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parameters of a layout were."""

    # (the module's registry, its key in it, the tensor, the address of its first element, its full name)
    found: tuple[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, int, str], ...]

    def assert_unmoved(self) -> None:
        """Raise UnsupportedLayout when a parameter was replaced or its memory moved."""
        for registry, key, tensor, address, name in self.found:
            if registry.get(key) is not tensor or tensor.data_ptr() != address:
                raise UnsupportedLayout(
                    f"{name} is not where it was when the layout was traced: something replaced the parameter, so the "
                    "map is void; restart the server"
                )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this rank keeps which checkpoint elements."""

    regions: tuple[Region, ...]  # in loading order; `Region.storage` indexes `storages`
    storages: tuple[LiveStorage, ...]  # those that hold a region
    unmapped: tuple[str, ...]  # tensors with elements of which this rank holds none: legal when others do
    unsupported: tuple[tuple[str, str], ...]  # (tensor, why it cannot be patched in place)

    def places(self, model: torch.nn.Module) -> Places:
        """What to look at to notice, in microseconds, that a storage has moved; raises as `flat_tensors`."""
        self.flat_tensors(model)
        held = {storage.name for storage in self.storages}
        found = []
        for prefix, module in model.named_modules():
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is not None and name in held:
                        found.append((registry, key, tensor, tensor.data_ptr(), name))
        return Places(tuple(found))

    def flat_tensors(self, model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        """Each storage as a one-dimensional tensor that aliases all of it, in the order of `storages`.

        Raises:
            UnsupportedLayout: a storage is gone, or not where and what it was at the trace.
        """
        tensors = dict(_named_tensors(model))
        flat = []
        for storage in self.storages:
            tensor = tensors.get(storage.name)
            now = None if tensor is None else _describe(storage.name, tensor)
            if tensor is None or now != storage:
                raise UnsupportedLayout(
                    f"{storage.name} was {storage} when the layout was traced and is {now} now: something replaced the "
                    "parameter, so the map is void; trace again"
                )
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.append(whole.set_(tensor.untyped_storage(), 0, (storage.numel,), (1,)))
        return tuple(flat)


def trace(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> Layout:
    """Let the model load tensors without elements and note where they would go.

    Args:
        model: has `load_weights(iterable of (name, tensor))`; may be live, or on the meta device.
        specs: every tensor of the checkpoint, under the names in the checkpoint.

    Raises:
        UnsupportedLayout: the loader fails, or replaces parameters; they are put back.
    """
    load_weights = getattr(model, "load_weights", None)
    if not callable(load_weights):
        raise UnsupportedLayout(f"{type(model).__name__} has no load_weights, so its layout cannot be traced")
    storages: list[LiveStorage] = []
    live: dict[int, int] = {}
    for name, tensor in _named_tensors(model):
        if live.setdefault(storage_key(tensor), len(storages)) == len(storages):
            storages.append(_describe(name, tensor))
    sources = {spec.name: torch.empty(spec.shape, dtype=BY_NAME[spec.dtype], device="meta") for spec in specs}
    recorder = Recorder(sources, live)
    with _parameters_kept(model):
        _load(load_weights, sources, recorder)
    return _resolve(recorder, storages, specs)


def _load(load_weights: Callable[..., object], sources: dict[str, torch.Tensor], recorder: Recorder) -> None:
    given = "the first tensor"

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal given
        for name, tensor in sources.items():
            given = name
            yield name, tensor

    try:
        with torch.no_grad(), recorder:
            load_weights(weights())
    except Exception as error:
        raise UnsupportedLayout(
            f"the model's loader cannot be traced, it failed at or just after {given}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back parameters that a loader rebinds (assignments bypass every dispatcher), and say so."""
    before: list[tuple[dict[str, Any], dict[str, Any], str]] = []
    for module in model.modules():
        before += [(held, dict(held), type(module).__name__) for held in (module._parameters, module._buffers)]
    data = [(name, tensor, tensor.data) for name, tensor in _named_tensors(model)]
    try:
        yield
    finally:
        rebound = [name for name, tensor, old in data if storage_key(tensor) != storage_key(old)]
        for _, tensor, old in data:
            tensor.data = old
        for now, old_ones, kind in before:
            if now.keys() != old_ones.keys() or any(now[key] is not old_ones[key] for key in old_ones):
                rebound.append(f"a parameter or buffer of {kind}")
                now.clear()
                now.update(old_ones)
    if rebound:
        raise UnsupportedLayout(f"the model's loader replaces {rebound[0]} instead of copying into it")


def _resolve(recorder: Recorder, storages: Sequence[LiveStorage], specs: Sequence[TensorSpec]) -> Layout:
    """Turn what was seen into regions, and find the tensors of which the regions would not tell the whole truth."""
    problems = dict(recorder.problems)
    regions: dict[Region, int] = {}  # in order; the value is when it was last copied
    for when, event in enumerate(recorder.events):
        if isinstance(event, Copy):
            reason = _dtype_problem(event, storages[event.storage])
            try:
                region = compose(event.tensor, event.source, event.target, event.storage, NAMES[event.target_dtype])
            except (UnsupportedLayout, KeyError) as error:
                reason = reason or str(error)
            if reason:
                problems.setdefault(event.tensor, reason)
            else:
                regions[region] = when
    by_storage: dict[int, list[Region]] = defaultdict(list)
    for region in regions:
        by_storage[region.storage].append(region)
    for index, held in by_storage.items():
        _find_collisions(held, storages[index], problems)
    _find_overwrites(recorder.events, regions, by_storage, storages, problems)
    kept = [region for region in regions if region.tensor not in problems]
    used = sorted({region.storage for region in kept})
    renumbered = {old: new for new, old in enumerate(used)}
    mapped = {region.tensor for region in kept} | problems.keys()
    return Layout(
        tuple(_with_storage(region, renumbered[region.storage]) for region in kept),
        tuple(storages[index] for index in used),
        tuple(spec.name for spec in specs if spec.numel and spec.name not in mapped),
        tuple((spec.name, problems[spec.name]) for spec in specs if spec.name in problems),
    )


def _dtype_problem(copy: Copy, storage: LiveStorage) -> str | None:
    if NAMES.get(copy.target_dtype) != storage.dtype:
        return f"{storage.name} is written as {copy.target_dtype}, which is not its type"
    if copy.source_dtype == copy.target_dtype or (copy.source_dtype, copy.target_dtype) in _WIDENINGS:
        return None
    return (
        f"it is {copy.source_dtype} in the checkpoint and {copy.target_dtype} in {storage.name}: the bits served "
        "would not be those published; publish in the type that is served"
    )


def _find_collisions(regions: list[Region], storage: LiveStorage, problems: dict[str, str]) -> None:
    """Name tensors that are copied to the same place: which one wins is the loader's secret."""
    while (clash := first_overlap([region.target for region in regions])) is not None:
        names = sorted({regions[index].tensor for index in clash})
        for name in names:
            rivals = " and ".join(other for other in names if other != name) or "other elements of it"
            problems.setdefault(name, f"it is copied to elements of {storage.name} to which {rivals} go too")
        regions = [region for region in regions if region.tensor not in names]


def _find_overwrites(
    events: Sequence[Copy | Overwrite],
    regions: dict[Region, int],
    by_storage: dict[int, list[Region]],
    storages: Sequence[LiveStorage],
    problems: dict[str, str],
) -> None:
    """Name tensors whose elements are changed after the copy, or from which the loader computes other live elements."""
    index = {storage: _ByOffset(held) for storage, held in by_storage.items()}
    for when, event in enumerate(events):
        if not isinstance(event, Overwrite):
            continue
        where = storages[event.storage].name
        if event.storage in index:
            box = Box.of(event.target)
            for region in index[event.storage].near(box):
                if regions[region] < when and first_overlap([region.target, box]) is not None:
                    problems.setdefault(region.tensor, f"{where} is rewritten after it was copied there ({event.what})")
        for read in event.reads:
            for region in by_storage.get(read, ()):
                if regions[region] < when:
                    problems.setdefault(region.tensor, f"the loader computes parts of {where} from it ({event.what})")


class _ByOffset:
    """Regions of one storage, to find those whose span meets a box."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.target_offset)
        targets = [region.target for region in self._regions]
        self._starts = np.array([box.offset for box in targets], np.int64)
        self._longest = max(box.end - box.offset for box in targets)

    def near(self, box: Box) -> list[Region]:
        first = int(np.searchsorted(self._starts, box.offset - self._longest, side="right"))
        return self._regions[first : int(np.searchsorted(self._starts, box.end))]


def _with_storage(region: Region, storage: int) -> Region:
    return Region(
        region.tensor,
        region.sizes,
        region.source_offset,
        region.source_strides,
        storage,
        region.target_offset,
        region.target_strides,
        region.target_dtype,
    )


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers; those without memory yet are left out."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not torch.nn.parameter.is_lazy(tensor):
            yield name, tensor


def _describe(name: str, tensor: torch.Tensor) -> LiveStorage:
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // tensor.element_size()
    return LiveStorage(name, storage.data_ptr(), NAMES.get(tensor.dtype, str(tensor.dtype)), numel, str(tensor.device))
