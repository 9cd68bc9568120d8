"""The CUDA library (csrc/cuda) on raw device addresses and a stream.

Does not know torch, and does not need a GPU to be imported: a call on a machine without one raises CudaError.
"""

from __future__ import annotations

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.native.library import CUDA_FUNCTIONS, Loaded, load
from vllm_delta_sync.native.types import Seed

DIFF_TILE = 8192  # elements that a diff counts together
TILE_COLUMNS, BLOCK_COLUMNS, CLASS_COLUMNS = 9, 4, 324  # of the tables that ctx tiles are decoded by


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

    def ctx_decode(
        self,
        width: int,
        tiles: int,
        count: int,
        blocks: int,
        block_count: int,
        models: int,
        positions: int,
        values: int,
        outcomes: int,
        stream: int,
    ) -> None:
        """Enqueue the decoding of ctx tiles of elements of 1, 2 or 4 bytes. All but counts are device addresses.

        tiles i64 [count, TILE_COLUMNS], blocks i64 [block_count, BLOCK_COLUMNS], models u16 [·, CLASS_COLUMNS]: rows of
        TileJob, BlockJob and ClassRow (csrc/ctx_team.h). positions u32 and values uW: of each block, in no order, at
        most what it has room for. outcomes u32 [block_count, 2]: changes found, and not 0 where a tile is malformed or
        there was no room.
        """
        self._check(
            "ctx",
            self._lib.vds_cuda_ctx_decode(
                width, tiles, count, blocks, block_count, models, positions, values, outcomes, stream
            ),
        )

    def diff_mark(self, width: int, before: int, after: int, n: int, masks: int, counts: int, stream: int) -> None:
        """Enqueue the first half of a diff of uW [n], n < 2**31. All arguments but n are device addresses.

        Of tiles of DIFF_TILE elements: masks u8 [tiles, DIFF_TILE // 8], aligned to 8, and counts u32 [tiles + 1], how
        many changes lie before each tile and, last, how many there are.
        """
        self._check("diff", self._lib.vds_cuda_diff_mark(width, before, after, n, masks, counts, stream))

    def diff_write(
        self,
        width: int,
        before: int,
        after: int,
        n: int,
        masks: int,
        counts: int,
        advance: bool,
        positions: int,
        old: int,
        new: int,
        stream: int,
    ) -> None:
        """Enqueue the second half: positions u32, old and new uW of every change, ascending.

        With `advance`, new values are written over the old ones in `before`.
        """
        self._check(
            "diff",
            self._lib.vds_cuda_diff_write(
                width, before, after, n, masks, counts, int(advance), positions, old, new, stream
            ),
        )

    def _check(self, what: str, status: int) -> None:
        if status:
            words = self._lib.vds_cuda_error(status).decode()
            raise CudaError(
                f"CUDA {what} kernel was not launched: error {status}, {words}; set `kernel: reference` to do without"
            )


def find() -> Loaded:
    """The CUDA library, or why there is none."""
    return load("vllm_delta_sync_cuda", CUDA_FUNCTIONS)
