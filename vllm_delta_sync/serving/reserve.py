"""Device memory that following takes, set aside before vLLM gives all that is left to its KV cache.

Knows torch and the kernels, not vLLM. Of a CPU nothing is set aside: what waits there is host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_delta_sync import kernels, native
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.kernels.upload import to_device, uploader
from vllm_delta_sync.native import CtxGrid
from vllm_delta_sync.native.ctx_types import CTX_WIDTHS, GAP_SYMBOLS, STEP_SYMBOLS, TOTAL
from vllm_delta_sync.native.types import WIDTHS, Seed
from vllm_delta_sync.serving.memory import Patch

LEAST = 1 << 20  # bytes of an arena: that of a small model still holds where elements go
SHARE = 16  # of the weights' bytes one: at eight bytes a change, 1.6 % of bf16 elements
WORK_BYTES = 128 << 20  # what decoding, reading and hashing take at a time: see device_tiles.CHANGES, device_hash.SPAN


def staged_bytes(weights: int, wanted: int | None, most: int) -> int:
    """Bytes of an arena beside weights of so many bytes.

    Args:
        wanted: what the settings say; None for a share of the weights.
        most: what the changes of a step may take anywhere.
    """
    return max(LEAST, min(most, weights // SHARE if wanted is None else wanted))


class Reserve:
    """What one rank has set aside.

    Args:
        backend: of the device.
        nbytes: of the arena, which keeps what is staged, and then what can undo it.

    Raises:
        ConfigError: the device has not as much left.
    """

    def __init__(self, backend: kernels.Backend, nbytes: int) -> None:
        self.backend = backend
        self.arena: kernels.Arena | None = None
        self._work: torch.Tensor | None = None
        if backend.device.type == "cpu":
            return
        uploader(backend.device)  # pins its buffers: later that would hold up the model's steps
        try:
            self.arena = kernels.Arena(nbytes, backend.device)
            with backend.aside():  # torch keeps memory by stream, and this is the one that will want it
                self._work = torch.empty(WORK_BYTES, dtype=torch.uint8, device=backend.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"beside the model, {backend.device} has no room for the {nbytes + WORK_BYTES} bytes that updates take "
                "there; lower device_staged_bytes, or serve the model on more devices"
            ) from error

    @classmethod
    def beside(
        cls,
        model: torch.nn.Module,
        make_backend: Callable[[torch.device], kernels.Backend],
        wanted: int | None,
        most: int,
    ) -> Reserve:
        """On the device of a model's weights, as `staged_bytes` says."""
        weights = list(model.parameters())
        backend = make_backend(weights[0].device if weights else torch.device("cpu"))
        made = cls(backend, staged_bytes(sum(weight.nbytes for weight in weights), wanted, most))
        if made.arena is not None:
            for width in sorted({weight.element_size() for weight in weights}):
                _rehearse(backend, made.arena, width)
        return made

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(0 if part is None else part.nbytes for part in (self.arena, self._work))

    def open_work(self) -> None:
        """The KV cache has its memory: leave to torch's allocator what staging will ask it for."""
        self._work = None


def _rehearse(backend: kernels.Backend, arena: kernels.Arena, width: int) -> None:
    """A commit of one element, its hash, and a tile of it: no step is to wait for what first launches compile and load.

    Raises what the kernels do on a device that they cannot serve after all.
    """
    column = np.zeros(1, WIDTHS[width])
    live = to_device(column, backend.device)
    patch = Patch(np.array([[0, 0, 0, 1]], np.int64), np.zeros(1, np.uint32), column, column)
    stray = backend.scatter(backend.prepare([live], patch, arena))
    assert stray == -1, f"{backend.name}: a commit of one element to {backend.device} found {stray} unlike itself"
    backend.hash(live, 0, Seed(0, 0))
    if backend.decode_tiles is not None and width in CTX_WIDTHS:
        with backend.aside():
            (found,) = backend.decode_tiles([_no_tile(live)])
        assert found is None, f"{backend.name}: {backend.device} made {found} of zeros, which are no tile"
    arena.clear()


def _no_tile(live: torch.Tensor) -> kernels.CodedBlock:
    """One element's block, of a tile of zeros: which states of a stream never are, so that decoding ends at once."""
    even = np.zeros((1, STEP_SYMBOLS), np.uint16)
    even[:, 0] = TOTAL
    model = native.ctx_model(np.array([255], np.uint8), even[:, :GAP_SYMBOLS], even)
    grid = CtxGrid(1, 1, np.array([[0, 1]], np.int64))
    return kernels.CodedBlock(model, live, grid, np.array([4 << 1], np.int64), np.zeros(4, np.uint8), 1)
