"""The kernels on a GPU: are they right to the bit, and how near are they to what its memory can do?

Needs torch and numpy, and neither vLLM nor a network: `make gpu-check` runs it on a bare machine. Does not fetch or
publish anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_delta_sync import kernels
from vllm_delta_sync.bench import gpu_data, gpu_parity
from vllm_delta_sync.bench.gpu_parity import SEED
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels import Prepared
from vllm_delta_sync.kernels.ctx import Launch
from vllm_delta_sync.kernels.upload import to_device
from vllm_delta_sync.native import cuda as native_cuda

PIECE = 1 << 30  # elements of one live tensor; offsets within it are 32-bit
SECTOR_BYTES = 32  # the least that a GPU's memory reads or writes
BLOCK = 1 << 22  # elements of a ctx block


@dataclass(frozen=True)
class KernelSpeed:
    """One backend's kernels on one device; medians."""

    name: str
    reason: str
    commit_us_per_million: float  # one launch (of Triton, two), per 10⁶ changed elements
    commit_over_limit: float  # that over sectors_us_per_million
    hash_gb_s: float
    hash_share: float  # of copy_gb_s
    diff_gb_s: float  # bytes of both states; what differs is written out besides
    diff_share: float
    decode: DecodeSpeed | None  # None where the host decodes


@dataclass(frozen=True)
class DecodeSpeed:
    """Decoding ctx tiles against weights on the device, in dense bytes of those; medians."""

    changed: int  # elements
    gb_s: float  # the kernel
    share: float  # of copy_gb_s
    whole_gb_s: float  # with what the host prepares, putting changes in order, and bringing them to the host


@dataclass(frozen=True)
class GpuFigures:
    """What `make gpu-check` writes to gpu.json."""

    device: str
    torch: str
    elements: int  # bf16
    changed: int
    copy_gb_s: float  # bytes read and bytes written, 10⁹ a second
    upload_gb_s: float  # what is staged, from pageable host memory into an arena, 10⁹ bytes a second
    sectors_us_per_million: float  # to read and to write 10⁶ of SECTOR_BYTES at that speed: the limit of a commit
    backends: tuple[KernelSpeed, ...]


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

    Returns how many comparisons were made. Raises AssertionError as `gpu_parity.check` does.
    """
    return sum(gpu_parity.check(backend, most) for backend in backends(device))


def measure(device: torch.device, elements: int, density: float, rounds: int = 7) -> GpuFigures:
    """Time the backends on `elements` bf16 weights of which the share `density` changes, in pieces of 2³⁰."""
    copy = _copy_speed(device, min(elements, PIECE), rounds)
    live = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16, device=device) for n in _pieces(elements)]
    updates = [_update(piece, density) for piece in live]
    changed = sum(update.elements for update in updates)
    new = live[0].clone()
    new[updates[0].offsets.long()] = updates[0].values
    speeds, sector = [], 2 * SECTOR_BYTES / copy
    for backend in backends(device):
        if backend.name.startswith("reference"):
            continue
        commit = _seconds(device, rounds, partial(_there_and_back, backend, _placed(backend, updates))) / 2
        passes = _seconds(device, rounds, partial(_hash_all, backend, live))
        compare = _seconds(device, rounds, partial(backend.diff, live[0], new, False))
        speeds.append(
            KernelSpeed(
                name=backend.name,
                reason=backend.reason,
                commit_us_per_million=commit * 1e12 / changed,
                commit_over_limit=commit / (changed * sector),
                hash_gb_s=elements * 2 / passes / 1e9,
                hash_share=elements * 2 / passes / copy,
                diff_gb_s=2 * new.nbytes / compare / 1e9,
                diff_share=2 * new.nbytes / compare / copy,
                decode=_decode_speed(backend, min(elements, PIECE), density, rounds, copy),
            )
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    upload = _upload_speed(device, updates[0], rounds)
    return GpuFigures(
        name, torch.__version__, elements, changed, copy / 1e9, upload / 1e9, sector * 1e12, tuple(speeds)
    )


def _pieces(elements: int) -> Iterator[int]:
    for first in range(0, elements, PIECE):
        yield min(PIECE, elements - first)


def _update(live: Tensor, density: float) -> Prepared:
    """What changes in one live tensor, where no backend has placed it yet: a segment of all of it."""
    parts = []
    for first in range(0, live.numel(), 1 << 26):  # `nonzero` and random numbers take 12 bytes an element
        size = min(1 << 26, live.numel() - first)
        parts.append((torch.rand(size, device=live.device) < density).nonzero()[:, 0] + first)
    where = torch.cat(parts)
    expected = live[where]
    segments = torch.tensor([[0, 0, 0, where.numel()]])
    return Prepared((live,), segments, where.to(torch.int32), expected, expected ^ 1)


def _placed(backend: kernels.Backend, updates: list[Prepared]) -> list[Prepared]:
    """As a server stages them: a commit only launches."""
    places = [backend.place(update.targets, update.places.numpy()) for update in updates]
    return [
        replace(update, places=to_device(rows, backend.device)) for update, rows in zip(updates, places, strict=True)
    ]


def _there_and_back(backend: kernels.Backend, updates: list[Prepared]) -> None:
    outcomes = [backend.write(update) for update in updates]
    outcomes += [backend.write(update.reversed()) for update in updates]
    assert all(int(outcome) == -1 for outcome in outcomes), "live bits were not as expected"


def _hash_all(backend: kernels.Backend, live: list[Tensor]) -> None:
    for piece in live:
        backend.state_hash(piece, 0, SEED)


def _decode_speed(
    backend: kernels.Backend, elements: int, density: float, rounds: int, copy: float
) -> DecodeSpeed | None:
    """On one block of weights again and again: its tiles are as far apart in memory as those of many blocks."""
    if backend.decode_tiles is None:
        return None
    old, changes = gpu_data.weights(min(elements, BLOCK), density)
    times = max(1, elements // BLOCK)
    one = gpu_data.coded(old, changes, gpu_data.row(old.size), backend.device)
    live = one.old.repeat(times)
    blocks = [replace(one, old=live[i * old.size : (i + 1) * old.size]) for i in range(times)]
    whole = _seconds(backend.device, rounds, partial(backend.decode_tiles, blocks))
    launch = Launch(blocks)
    library = _library()
    stream = torch.cuda.current_stream(backend.device).cuda_stream if backend.device.type == "cuda" else 0
    kernel = _seconds(backend.device, rounds, partial(launch.run, library, stream))
    for found in launch.results():
        assert found is not None and np.array_equal(found[0], changes.positions), "tiles were decoded to other changes"
    return DecodeSpeed(
        changed=times * changes.positions.size,
        gb_s=live.nbytes / kernel / 1e9,
        share=live.nbytes / kernel / copy,
        whole_gb_s=live.nbytes / whole / 1e9,
    )


def _library() -> native_cuda.CudaLibrary:
    return native_cuda.CudaLibrary(native_cuda.find())


def _copy_speed(device: torch.device, elements: int, rounds: int) -> float:
    """Bytes read and written a second by torch's own copy."""
    source = torch.ones(elements, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(device, rounds, lambda: target.copy_(source))


def _upload_speed(device: torch.device, update: Prepared, rounds: int) -> float:
    """Bytes of a patch a second; `prepare` waits until they are there."""
    columns = (update.offsets, update.expected, update.values)
    host = [column.cpu().numpy().view(f"u{column.element_size()}") for column in columns]
    patch = gpu_parity.Staged(update.places.numpy(), *host)
    arena, backend = kernels.Arena(8 * update.elements + 4096, device), kernels.select("reference", device)

    def stage() -> None:
        arena.clear()
        backend.prepare(update.targets, patch, arena)

    return sum(column.nbytes for column in host) / _seconds(device, rounds, stage)


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
    """Check, then measure, then write the figures.

    Raises:
        ConfigError: a GPU has not got the native kernels.
    """
    parser = argparse.ArgumentParser(prog="python -m vllm_delta_sync.bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=7_000_000_000, help="bf16 weights to time; 0 only checks")
    parser.add_argument("--density", type=float, default=0.01, help="share of them that changes")
    parser.add_argument("--largest-check", type=int, default=1_000_003, help="elements of the largest comparison")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type != "cpu":
        kernels.select("native", device)  # what is to be checked: without it the others would pass for all
    print(f"{check(device, options.largest_check)} comparisons, all equal: {[b.name for b in backends(device)]}")
    if options.elements:
        figures = json.dumps(asdict(measure(device, options.elements, options.density)), indent=1)
        options.out.write_text(figures + "\n")
        print(figures)


if __name__ == "__main__":
    main()
