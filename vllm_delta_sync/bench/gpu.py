"""The kernels on a GPU: are they right to the bit, and how near are they to what its memory can do?

Needs torch and numpy, and neither vLLM nor a network: `make gpu-check` runs it on a bare machine. Does not time
decoding and diffing: the CPU does those (`bench encode`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync import kernels, native
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.native import Seed

SEED = Seed(0x0123456789ABCDEF, 0xFEDCBA9876543210)
PIECE = 1 << 30  # elements of one live tensor; offsets within it are 32-bit
SECTOR_BYTES = 32  # the least that a GPU's memory reads or writes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class KernelSpeed:
    """One backend's kernels on one device; medians."""

    name: str
    reason: str
    commit_us_per_million: float  # compare and write, per 10⁶ changed elements
    commit_over_limit: float  # that over the time in which one sector per element is read and written at copy_gb_s
    hash_gb_s: float
    hash_share: float  # of copy_gb_s


@dataclass(frozen=True)
class GpuFigures:
    """What `make gpu-check` writes to gpu.json."""

    device: str
    torch: str
    elements: int  # bf16
    changed: int
    copy_gb_s: float  # bytes read and bytes written, 10⁹ a second
    backends: tuple[KernelSpeed, ...]


@dataclass(frozen=True)
class _Update:
    """What changes in one live tensor; columns as the `scatter_` op takes them."""

    segments: Tensor
    offsets: Tensor
    expected: Tensor
    values: Tensor


def backends(device: torch.device) -> list[kernels.Backend]:
    """Every backend that can serve the device, the reference last."""
    found = []
    policies: tuple[kernels.Policy, ...] = ("native", "triton", "reference")
    for policy in policies:
        try:
            found.append(kernels.select(policy, device))
        except ConfigError:
            continue
    return found


def check(device: torch.device, most: int) -> int:
    """Compare every backend with the C library (or numpy) bit by bit, at sizes up to `most` elements.

    Returns how many comparisons were made.

    Raises:
        AssertionError: a kernel gives other bits; the message names it.
    """
    rng = np.random.default_rng(0)
    made = 0
    for backend in backends(device):
        for width in _INTEGERS:
            for n in sorted({1, 31, 1024, 1025, most}):
                made += _check_hash(backend, width, n, rng) + _check_scatter(backend, width, n, rng)
    return made


def _check_hash(backend: kernels.Backend, width: int, n: int, rng: np.random.Generator) -> int:
    bits = rng.integers(0, 256, n * width, np.uint8).view(f"u{width}")
    live = torch.from_numpy(bits.view(np.uint8)).view(_INTEGERS[width]).to(backend.device)
    for start in (0, 1023, 2**33 + 5):
        wanted = native.hash_run(bits, start, SEED)
        found = backend.hash(live, start, SEED)
        assert np.array_equal(found, wanted), f"{backend.name}: hash of {n} elements of {width} bytes from {start}"
    return 3


def _check_scatter(backend: kernels.Backend, width: int, n: int, rng: np.random.Generator) -> int:
    what = f"{backend.name}: scatter of {n} elements of {width} bytes"
    host = torch.from_numpy(rng.integers(0, 256, 3 * n * width, np.uint8)).view(_INTEGERS[width])
    live = host.clone().to(backend.device)
    places = torch.from_numpy(np.sort(rng.choice(3 * n, n, replace=False)).astype(np.int32))
    expected = host[places.long()]
    values = expected ^ 1
    columns = [column.to(backend.device) for column in (places, expected, values)]
    segments = torch.tensor([[0, 0, 0, n]], device=backend.device)
    assert int(backend.scatter_([live], segments, *columns)) == -1, f"{what}: live bits were not found as expected"
    wanted = host.clone()
    wanted[places.long()] = values
    assert torch.equal(live.cpu(), wanted), f"{what}: other bits were written"
    stray = n // 2  # whose live bits are `values` now, so that all before it have to be put right first
    columns[1] = columns[2].clone()
    columns[1][stray] ^= 4
    assert int(backend.scatter_([live], segments, *columns)) == stray, f"{what}: a stray write was not found"
    assert torch.equal(live.cpu(), wanted), f"{what}: something was written although a live element was not as expected"
    return 4


def measure(device: torch.device, elements: int, density: float, rounds: int = 7) -> GpuFigures:
    """Time the backends on `elements` bf16 weights of which the share `density` changes, in pieces of 2³⁰."""
    copy = _copy_speed(device, min(elements, PIECE), rounds)
    live = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16, device=device) for n in _pieces(elements)]
    updates = [_update(piece, density) for piece in live]
    changed = sum(update.offsets.numel() for update in updates)
    speeds = []
    for backend in backends(device):
        if backend.name.startswith("reference"):
            continue
        commit = _seconds(device, rounds, partial(_there_and_back, backend, live, updates)) / 2
        passes = _seconds(device, rounds, partial(_hash_all, backend, live))
        limit = changed * 2 * SECTOR_BYTES / copy
        speeds.append(
            KernelSpeed(
                name=backend.name,
                reason=backend.reason,
                commit_us_per_million=commit * 1e12 / changed,
                commit_over_limit=commit / limit,
                hash_gb_s=elements * 2 / passes / 1e9,
                hash_share=elements * 2 / passes / copy,
            )
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return GpuFigures(name, torch.__version__, elements, changed, copy / 1e9, tuple(speeds))


def _pieces(elements: int) -> Iterator[int]:
    for first in range(0, elements, PIECE):
        yield min(PIECE, elements - first)


def _update(live: Tensor, density: float) -> _Update:
    parts = []
    for first in range(0, live.numel(), 1 << 26):  # `nonzero` and random numbers take 12 bytes an element
        size = min(1 << 26, live.numel() - first)
        parts.append((torch.rand(size, device=live.device) < density).nonzero()[:, 0] + first)
    where = torch.cat(parts)
    expected = live[where]
    segments = torch.tensor([[0, 0, 0, where.numel()]], device=live.device)
    return _Update(segments, where.to(torch.int32), expected, expected ^ 1)


def _there_and_back(backend: kernels.Backend, live: list[Tensor], updates: list[_Update]) -> None:
    outcomes = []
    for piece, update in zip(live, updates, strict=True):
        outcomes.append(backend.scatter_([piece], update.segments, update.offsets, update.expected, update.values))
    for piece, update in zip(live, updates, strict=True):
        outcomes.append(backend.scatter_([piece], update.segments, update.offsets, update.values, update.expected))
    assert all(int(outcome) == -1 for outcome in outcomes), "live bits were not as expected"


def _hash_all(backend: kernels.Backend, live: list[Tensor]) -> None:
    for piece in live:
        backend.state_hash(piece, 0, SEED)


def _copy_speed(device: torch.device, elements: int, rounds: int) -> float:
    """Bytes read and written a second by torch's own copy."""
    source = torch.ones(elements, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(device, rounds, lambda: target.copy_(source))


def _seconds(device: torch.device, rounds: int, run: Callable[[], object]) -> float:
    """Median seconds, the device's own time; one turn more comes first, in which things are compiled and paged in."""
    taken = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main(arguments: list[str] | None = None) -> None:
    """Check, then measure, then write the figures."""
    parser = argparse.ArgumentParser(prog="python -m vllm_delta_sync.bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=7_000_000_000, help="bf16 weights to time; 0 only checks")
    parser.add_argument("--density", type=float, default=0.01, help="share of them that changes")
    parser.add_argument("--largest-check", type=int, default=1_000_003, help="elements of the largest comparison")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(f"{check(device, options.largest_check)} comparisons, all equal: {[b.name for b in backends(device)]}")
    if options.elements:
        figures = json.dumps(asdict(measure(device, options.elements, options.density)), indent=1)
        options.out.write_text(figures + "\n")
        print(figures)


if __name__ == "__main__":
    main()
