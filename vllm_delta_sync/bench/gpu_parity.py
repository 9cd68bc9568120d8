"""Compares every kernel of a device with the C library (or numpy), bit by bit.

Needs torch and numpy only; does not time anything.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync import native
from vllm_delta_sync.bench import gpu_data
from vllm_delta_sync.kernels import Arena, Backend
from vllm_delta_sync.kernels.ctx import Decoded, decode_on_host
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import CtxGrid, Seed
from vllm_delta_sync.native.ctx_types import CTX_WIDTHS
from vllm_delta_sync.native.types import I64, U32, Bits

SEED = Seed(0x0123456789ABCDEF, 0xFEDCBA9876543210)
WIDTHS = (1, 2, 4, 8)
DAMAGED = 9  # variants of a block
SEGMENTS = 5  # of an update
_NARROW = CtxGrid(9, 8, np.array([(0, 3), (3, 5)], np.int64))  # rows that begin anywhere
_WIDE = CtxGrid(40, 83, np.array([(0, 36), (36, 36), (72, 11)], np.int64))


class Staged(NamedTuple):
    """A patch in host memory."""

    segments: I64
    offsets: U32
    expected: Bits
    values: Bits


def check(backend: Backend, most: int) -> int:
    """Compare a backend's kernels at sizes up to `most` elements; returns how many comparisons were made.

    Raises:
        AssertionError: a kernel gives other bits; the message names it.
    """
    rng = np.random.default_rng(0)
    made = 0
    for width in WIDTHS:
        for n in sorted({1, 31, 1024, 1025, most}):
            made += _hash(backend, width, n, rng) + _scatter(backend, width, n, rng) + _diff(backend, width, n, rng)
            made += _staged(backend, width, n, rng)
    if backend.decode_tiles is not None:
        for width in CTX_WIDTHS:
            made += _tiles(backend, width, most)
    return made


def _hash(backend: Backend, width: int, n: int, rng: np.random.Generator) -> int:
    bits = rng.integers(0, 256, n * width, np.uint8).view(f"u{width}")
    live = to_device(bits, backend.device)
    for start in (0, 1023, 2**33 + 5):
        wanted = native.hash_run(bits, start, SEED)
        found = backend.hash(live, start, SEED)
        assert np.array_equal(found, wanted), f"{backend.name}: hash of {n} elements of {width} bytes from {start}"
    return 3


def _scatter(backend: Backend, width: int, n: int, rng: np.random.Generator) -> int:
    what = f"{backend.name}: scatter of {n} elements of {width} bytes"
    host = to_device(rng.integers(0, 256, 3 * n * width, np.uint8).view(f"u{width}"), torch.device("cpu"))
    live = host.clone().to(backend.device)
    places = torch.from_numpy(np.sort(rng.choice(3 * n, n, replace=False)).astype(np.int32))
    expected = host[places.long()]
    values = expected ^ 1

    def put(column: Tensor) -> Tensor:
        no_room = backend.device.type == "cuda" and n % 2  # half of the patches are as where the device has none
        return column.pin_memory() if no_room else column.to(backend.device)

    columns = [put(column) for column in (places, expected, values)]
    ends = [n * part // SEGMENTS for part in range(SEGMENTS + 1)]  # of few elements, some are empty
    segments = torch.tensor([[0, 0, *piece] for piece in pairwise(ends)], device=backend.device)
    assert int(backend.scatter_([live], segments, *columns)) == -1, f"{what}: live bits were not found as expected"
    wanted = host.clone()
    wanted[places.long()] = values
    assert torch.equal(live.cpu(), wanted), f"{what}: other bits were written"
    stray = n // 2  # whose live bits are `values` now, so that all before it have to be put right first
    strayed = values.clone()
    strayed[stray] ^= 4
    columns[1] = put(strayed)
    assert int(backend.scatter_([live], segments, *columns)) == stray, f"{what}: a stray write was not found"
    assert torch.equal(live.cpu(), wanted), f"{what}: something was written although a live element was not as expected"
    return 4


def _staged(backend: Backend, width: int, n: int, rng: np.random.Generator) -> int:
    """A patch by way of an arena, as a rank stages it, and what takes it back."""
    what = f"{backend.name}: patch of {n} elements of {width} bytes by way of an arena"
    bits = rng.integers(0, 256, 2 * n * width, np.uint8).view(f"u{width}")
    live = to_device(bits.copy(), backend.device)
    offsets = np.sort(rng.choice(2 * n, n, replace=False)).astype(np.uint32)
    staged = Staged(np.array([[0, 0, 0, n]]), offsets, bits[offsets], ~bits[offsets])
    patch = backend.prepare([live], staged, Arena((8 + 2 * width) * n + 2048, backend.device))
    wanted = bits.copy()
    wanted[offsets] = staged.values
    for step, after in ((patch, wanted), (patch.reversed(), bits)):
        assert backend.scatter(step) == -1, f"{what}: live bits were not found as expected"
        assert np.array_equal(live.cpu().numpy().view(bits.dtype), after), f"{what}: other bits were written"
    return 2


def _diff(backend: Backend, width: int, n: int, rng: np.random.Generator) -> int:
    what = f"{backend.name}: diff of {n} elements of {width} bytes"
    old, changes = gpu_data.anything(n + 1, width, 0.3, int(rng.integers(1 << 30)))
    new = old.copy()
    new[changes.positions] = changes.new
    for first in (0, 1):  # from where memory is aligned, and from where it is not
        before, after = (to_device(bits.copy(), backend.device)[first:] for bits in (old, new))
        wanted = native.diff(old[first:].copy(), new[first:], advance=False)
        for column, found in zip(wanted, backend.diff(before, after, True), strict=True):
            assert np.array_equal(column, found.cpu().numpy().view(column.dtype)), what
        assert torch.equal(before, after), f"{what}: what differs was not written over what was"
    return 2


def _tiles(backend: Backend, width: int, most: int) -> int:
    """Blocks with few and with many changes, alone and damaged, all in one launch."""
    assert backend.decode_tiles is not None
    blocks = []
    for density in (0.02, 0.6):
        for grid in (_NARROW, _WIDE, gpu_data.row(max(10_000, most))):
            old, changes = gpu_data.anything(grid.elements, width, density, grid.rows)
            block = gpu_data.coded(old, changes, grid, backend.device)
            blocks.append(block)
            if block.data.size:
                blocks += [gpu_data.damaged(block, seed) for seed in range(DAMAGED)]
    for block, found in zip(blocks, backend.decode_tiles(blocks), strict=True):
        what = f"{backend.name}: ctx tiles of {block.grid.rows} rows of {block.grid.row_length}, {width} bytes each"
        assert _same(decode_on_host(block), found), what
    return len(blocks)


def _same(one: Decoded | None, other: Decoded | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
