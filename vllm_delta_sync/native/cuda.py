"""The CUDA library (csrc/cuda) on raw device addresses and a stream.

Does not know torch, and does not need a GPU to be imported: a call on a machine without one raises CudaError.
"""

from __future__ import annotations

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.native.library import CUDA_FUNCTIONS, Loaded, load
from vllm_delta_sync.native.types import Seed


class CudaError(DeltaSyncError):
    """A kernel of ours could not be launched."""

    cause = "cuda"


class CudaLibrary:
    """The loaded CUDA library.

    Args:
        loaded: what `find` returned; ConfigError is the caller's to raise when it holds no library.
    """

    def __init__(self, loaded: Loaded) -> None:
        assert loaded.library is not None, loaded.reason
        self._lib = loaded.library
        self.path = loaded.reason

    def scatter(
        self,
        width: int,
        segments: int,
        count: int,
        offsets: int,
        expected: int,
        values: int,
        n: int,
        first: int,
        stream: int,
    ) -> None:
        """Enqueue a scatter with the meaning of `native.scatter`. All arguments but counts are device addresses.

        segments i64 [count, 4], offsets u32 [n], expected and values uW [n]; first: i64 [1], receives −1 or the index.
        """
        self._check(
            "scatter", self._lib.vds_cuda_scatter(width, segments, count, offsets, expected, values, n, first, stream)
        )

    def state_hash(self, width: int, bits: int, n: int, start: int, seed: Seed, lanes: int, stream: int) -> None:
        """Enqueue a hash with the meaning of `native.hash_run`; lanes: device address of u32 [4]."""
        self._check("hash", self._lib.vds_cuda_hash(width, bits, n, start, seed.a, seed.b, lanes, stream))

    def _check(self, what: str, status: int) -> None:
        if status:
            words = self._lib.vds_cuda_error(status).decode()
            raise CudaError(
                f"CUDA {what} kernel was not launched: error {status}, {words}; set `kernel: reference` to do without"
            )


def find() -> Loaded:
    """The CUDA library, or why there is none."""
    return load("vllm_delta_sync_cuda", CUDA_FUNCTIONS)
