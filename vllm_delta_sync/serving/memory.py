"""One rank's live weights as bits: read, hash and patch through the layout's regions.

Knows torch and the kernels, not vLLM and not the log. Reading never blocks a step. A live element may be wider than the
published one (a bf16 bias kept in fp32): bits are narrowed when read and widened when written, both exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_delta_sync import kernels, native
from vllm_delta_sync.errors import Poisoned, StateError, StateHashMismatch, StrayWrite, UnsupportedLayout
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import Seed, huge_pages
from vllm_delta_sync.native.types import I64, U32, Bits
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.device_hash import hash_region
from vllm_delta_sync.wire import dtypes

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHIFT = {("BF16", "F32"): 16}
MAX_SPAN = 1 << 32  # offsets are 32-bit, relative to a segment's base


@dataclass(frozen=True)
class Patch:
    """All changes to live elements of one width, for one kernel call.

    Row (storage, base, first, last) of `segments`: changes first … last−1 go to element base + offset of that storage.
    """

    segments: I64  # [S, 4]
    offsets: U32  # [n]
    expected: Bits  # [n]; what was read while staging, which makes it the undo log
    values: Bits  # [n]


class LiveMemory:
    """The storages that a layout's regions point into.

    Args:
        storages: one flat 1-D tensor per storage, covering all of it.
        backend: the kernel implementation that patches.
        arena: of the device that holds them, for what waits to be written; None for a CPU.

    Raises:
        UnsupportedLayout: a storage is on another device than the kernels.
    """

    def __init__(
        self, storages: Sequence[torch.Tensor], backend: kernels.Backend, arena: kernels.Arena | None = None
    ) -> None:
        self._flat = tuple(storages)
        self._backend = backend
        self._arena = arena
        elsewhere = {str(flat.device) for flat in self._flat if flat.device != backend.device}
        if elsewhere:
            raise UnsupportedLayout(
                f"weights lie on {', '.join(sorted(elsewhere))} besides {backend.device}, where commits are made; "
                "serve without offloading weights"
            )
        self._preparing = threading.Lock()
        widths = [flat.element_size() for flat in self._flat]
        self._targets = {
            width: [flat.view(_INTEGER[width]) for flat in self._flat if flat.element_size() == width]
            for width in set(widths)
        }
        self._slot = [widths[:i].count(width) for i, width in enumerate(widths)]

    def prefer_huge_pages(self) -> None:
        """Move what lies in the host's memory to huge pages: a commit, and decoding, go all over it."""
        here = [flat for flat in self._flat if flat.device.type == "cpu"]
        huge_pages.prefer((flat.data_ptr(), flat.nbytes) for flat in here)

    def read(self, region: Region, dtype: str, offsets: U32) -> Bits:
        """The elements at `offsets` from the region's first, as bits of the published `dtype`."""
        flat = self._flat[region.storage]
        if flat.device.type == "cpu":
            address = flat.data_ptr() + region.target_offset * flat.element_size()
            live = native.gather(address, flat.element_size(), offsets)
        else:
            index = (to_device(offsets, flat.device).to(torch.int64) & 0xFFFFFFFF) + region.target_offset
            live = _unsigned(flat.view(_INTEGER[flat.element_size()])[index].cpu())
        return _narrow(live, region, dtype)

    def hash(self, region: Region, dtype: str, seed: Seed) -> native.types.U32:
        """The region's lanes, uint32[4]: one pass over its live elements."""
        flat = self._flat[region.storage]
        if flat.device.type == "cpu" and region.target_dtype == dtype:
            address = flat.data_ptr() + region.target_offset * flat.element_size()
            return native.hash_strided(
                address,
                flat.element_size(),
                region.sizes,
                region.target_strides,
                region.source_offset,
                region.source_strides,
                seed,
            )
        if flat.device.type != "cpu" and region.target_dtype == dtype:
            return hash_region(flat.view(_INTEGER[flat.element_size()]), region, seed, self._backend)
        bits = np.ascontiguousarray(self.elements(region, dtype))
        strides = [int(np.prod(region.sizes[i + 1 :])) for i in range(len(region.sizes))]
        return native.hash_strided(
            bits.ctypes.data, bits.itemsize, region.sizes, strides, region.source_offset, region.source_strides, seed
        )

    def elements(self, region: Region, dtype: str) -> Bits:
        """All of a region's elements, flat, ascending in checkpoint position, as bits of the published `dtype`."""
        return _narrow(_unsigned(self._live(region).cpu()), region, dtype)

    def device_elements(self, region: Region, dtype: str) -> torch.Tensor:
        """The same as integers [region.numel] on the device: live memory itself where nothing lies between them."""
        if region.target_dtype == dtype:
            return self._live(region)
        return to_device(np.ascontiguousarray(self.elements(region, dtype)), self._backend.device)

    def _live(self, region: Region) -> torch.Tensor:
        flat = self._flat[region.storage]
        integers = flat.view(_INTEGER[flat.element_size()])
        return torch.as_strided(integers, region.sizes, region.target_strides, region.target_offset).reshape(-1)

    @property
    def decode_tiles(self) -> kernels.DecodeTiles | None:
        """How tiles of ctx blocks are decoded on the device; None where the host decodes them."""
        return self._backend.decode_tiles

    def segment(self, region: Region) -> tuple[int, int, int]:
        """(width, storage slot, base element): where a patch's segment for this region begins."""
        flat = self._flat[region.storage]
        return flat.element_size(), self._slot[region.storage], region.target_offset

    def prepare(self, patches: Mapping[int, Patch]) -> tuple[kernels.Prepared, ...]:
        """Bring the patches of a step, by width, to where the kernels read them: a commit moves nothing else.

        They take the place of the step before, which cannot be written or taken back any more.
        """
        with self._preparing:
            if self._arena is not None:
                self._arena.clear()
            return tuple(
                self._backend.prepare(self._targets[width], patch, self._arena) for width, patch in patches.items()
            )

    def scatter(self, patches: Sequence[kernels.Prepared]) -> None:
        """Write all patches, or none.

        Raises:
            StrayWrite: a live element is not what was staged against; every element is as it was before the call. So
                it is after any other error of a kernel, too.
            Poisoned: what was written before the error could not be taken back.
            StateError: another step was prepared meanwhile; nothing was written.
        """
        with self._preparing:
            if self._arena is not None and any(patch.turn != self._arena.turn for patch in patches):
                raise StateError("another step was staged where this one was; nothing was written")
            self._scatter(patches)

    def _scatter(self, patches: Sequence[kernels.Prepared]) -> None:
        written: list[kernels.Prepared] = []
        try:
            for patch in patches:
                first = self._backend.scatter(patch)
                if first >= 0:
                    raise StrayWrite(
                        f"live element {first} of {patch.elements} was written by something else between staging and "
                        "commit; nothing was changed"
                    )
                written.append(patch)
        except BaseException as error:
            self._take_back(written, error)
            raise

    def _take_back(self, written: Sequence[kernels.Prepared], cause: BaseException) -> None:
        for patch in reversed(written):
            try:
                first = self._backend.scatter(patch.reversed())
            except Exception as error:
                raise Poisoned(f"the kernel failed twice, and part of an update stays written: {error}") from cause
            if first >= 0:
                raise Poisoned("part of an update stays written: something else wrote over it meanwhile") from cause


def offsets_of(region: Region, targets: I64) -> U32:
    """Targets relative to the region as 32-bit offsets."""
    if len(targets) and int(targets.max()) >= MAX_SPAN:
        raise UnsupportedLayout(f"{region.tensor!r} spreads over more than 2**32 live elements")
    return targets.astype(np.uint32)


def widen(values: Bits, region: Region, dtype: str) -> Bits:
    """Published bits as live bits."""
    if region.target_dtype == dtype:
        return values
    if (dtype, region.target_dtype) == ("F16", "F32"):
        return np.asarray(values.view(np.float16).astype(np.float32).view(np.uint32))
    wide = dtypes.by_name(region.target_dtype).width
    return np.asarray(values.astype(f"u{wide}") << np.array(_SHIFT[dtype, region.target_dtype], dtype=f"u{wide}"))


def _narrow(live: Bits, region: Region, dtype: str) -> Bits:
    if region.target_dtype == dtype:
        return live
    if (dtype, region.target_dtype) == ("F16", "F32"):
        narrow = live.view(np.float32).astype(np.float16).view(np.uint16)
    else:
        shift = _SHIFT[dtype, region.target_dtype]
        narrow = (live >> np.array(shift, dtype=live.dtype)).astype(f"u{dtypes.by_name(dtype).width}")
    if not np.array_equal(widen(narrow, region, dtype), live):
        raise StateHashMismatch(
            f"{region.tensor!r} is kept as {region.target_dtype} and holds values that no {dtype} has; it "
            "was changed after loading"
        )
    return narrow


def _unsigned(tensor: torch.Tensor) -> Bits:
    array = tensor.numpy()
    return array.view(f"u{array.itemsize}")
