"""The kernels on CUDA tensors through the CUDA library, on torch's current stream.

Does not wait for the device, except where a result is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_delta_sync.kernels.patch import Prepared
from vllm_delta_sync.native.cuda import DIFF_TILE, CudaLibrary
from vllm_delta_sync.native.types import Seed


def write(library: CudaLibrary, patch: Prepared, device: torch.device, stream: int) -> Tensor:
    """Enqueue the commit of a patch, whose columns may be in pinned memory of the host: one launch, and nothing else.

    Returns what `kernels.ops.scatter_` does; `stream` is the handle of torch's current one.
    """
    first = torch.empty((), dtype=torch.int64, device=device)
    library.scatter(
        patch.width, patch.places.data_ptr(), len(patch.places), patch.offsets.data_ptr(), patch.expected.data_ptr(),
        patch.values.data_ptr(), patch.elements, first.data_ptr(), stream,
    )  # fmt: skip
    return first


def diff(
    library: CudaLibrary, before: Tensor, after: Tensor, advance: bool, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.ops`; `stream` is the handle of torch's current one. Waits once, for how many there are."""
    n, width, device = before.numel(), before.element_size(), before.device
    tiles = -(-n // DIFF_TILE)
    masks = torch.empty(tiles * DIFF_TILE // 8, dtype=torch.uint8, device=device)
    counts = torch.empty(tiles + 1, dtype=torch.int32, device=device)
    library.diff_mark(width, before.data_ptr(), after.data_ptr(), n, masks.data_ptr(), counts.data_ptr(), stream)
    found = int(counts[-1])
    positions = torch.empty(found, dtype=torch.int32, device=device)
    old, new = torch.empty_like(before[:found]), torch.empty_like(after[:found])
    library.diff_write(
        width, before.data_ptr(), after.data_ptr(), n, masks.data_ptr(), counts.data_ptr(), advance,
        positions.data_ptr(), old.data_ptr(), new.data_ptr(), stream,
    )  # fmt: skip
    return positions, old, new


def state_hash(library: CudaLibrary, bits: Tensor, start: int, seed: Seed) -> Tensor:
    """See `kernels.ops`."""
    lanes = torch.empty(4, dtype=torch.int32, device=bits.device)
    with torch.cuda.device(bits.device):
        library.state_hash(
            bits.element_size(), bits.data_ptr(), bits.numel(), start, seed, lanes.data_ptr(),
            torch.cuda.current_stream(bits.device).cuda_stream,
        )  # fmt: skip
    return lanes.to(torch.int64) & 0xFFFFFFFF
