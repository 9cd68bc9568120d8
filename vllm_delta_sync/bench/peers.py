"""How others encode the same update, with their own software or their own layout.

Does not judge what they leave out: none of these checks that the receiver holds the base.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from vllm_delta_sync.bench.step import Model, parts
from vllm_delta_sync.kernels.dtypes import BY_NAME

Tensors = dict[str, torch.Tensor]


class ArcV3:
    """Fireworks' `arc_v3`, one tensor after the other. It tries several ways in threads of its own.

    Args:
        package: as `arc_package` gives it.
        before, after: two states of one model.
    """

    def __init__(self, package: Any, before: Model, after: Model) -> None:
        self._package = package
        self._before, self._after = as_tensors(before), as_tensors(after)

    def encode(self) -> dict[str, tuple[torch.Tensor, str]]:
        """name → (compressed difference, checksum)."""
        return {
            name: self._package.delta_compress(src=self._before[name], dst=tensor, compression_format="arc_v3")
            for name, tensor in self._after.items()
        }

    def decode(self, encoded: dict[str, tuple[torch.Tensor, str]]) -> Tensors:
        """The new tensors; copies."""
        return {
            name: self._package.delta_decompress(
                src=self._before[name], compressed_diff=diff, checksum=checksum, compression_format="arc_v3"
            )
            for name, (diff, checksum) in encoded.items()
        }

    def bytes(self) -> int:
        """Bytes of the file that it writes."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "delta.safetensors"
            self._package.delta_compress_dicts_to_file(
                src=self._before, dst=self._after, diff_file=str(file), compression_format="arc_v3"
            )
            return file.stat().st_size


def arc_package(*, patient: bool) -> Any | None:
    """The package `fireworks_delta_compression`, or None where it is not installed.

    Args:
        patient: let every way that it tries finish, so that its smallest result counts. As it ships, it gives those up
            that take more than half as long again as the first. Decided at the first import in a process.
    """
    if patient:
        os.environ["ARC3_CANDIDATE_WAIT_MULTIPLIER"] = "1000"
    # It reads what it decompressed without copying it, which torch remarks upon.
    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
    try:
        import fireworks_delta_compression
    except ImportError:
        return None
    return fireworks_delta_compression


def xor_zstd_bytes(before: Model, after: Model) -> int:
    """Bytes of the full-size XOR of each tensor, as a zstd frame of level 1 each (ModelExpress); no container."""
    compressor = zstandard.ZstdCompressor(level=1)
    return sum(len(compressor.compress((before[name][1] ^ bits).data)) for name, (_, bits) in after.items())


def int32_bytes(before: Model, after: Model) -> int:
    """Bytes of an int32 index and the new value for each change (vLLM's `sparse_nccl`, verl); no container."""
    return sum(part.diff().positions.size * (4 + part.spec.width) for part in parts(before, after))


class NonzeroGather:
    """A difference as torch's own operations find it: compare, list the places, gather the new values there."""

    def __init__(self, before: Model, after: Model) -> None:
        # As integers, since a comparison of floats takes -0.0 for 0.0.
        self._sides = [
            tuple(torch.from_numpy(bits.view(f"i{bits.itemsize}")) for bits in (before[name][1], bits))
            for name, (_, bits) in after.items()
        ]

    def encode(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(int64 indices, new values) of every tensor."""
        found = []
        for old, new in self._sides:
            index = torch.ne(old, new).nonzero().view(-1)
            found.append((index, new[index]))
        return found


def as_tensors(model: Model) -> Tensors:
    """A model as torch tensors of its own dtypes and shapes, on the same memory."""
    return {
        name: torch.from_numpy(bits.view(np.dtype(f"i{bits.itemsize}"))).view(BY_NAME[spec.dtype]).view(spec.shape)
        for name, (spec, bits) in model.items()
    }
