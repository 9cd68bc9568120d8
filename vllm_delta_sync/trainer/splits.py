"""Which dimension of a tensor tensor-parallel servers split, guessed from its name.

Does not know any server's layout. A wrong guess costs servers that split otherwise, not correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.wire.tensors import TensorSpec

SplitDim: TypeAlias = Callable[[TensorSpec], int]

# Projections back to the hidden size, by the names that architectures give them: split by columns. All others, and
# embeddings, are split by rows.
ROW_PARALLEL = frozenset(
    ("o_proj", "down_proj", "out_proj", "wo", "w2", "fc2", "c_proj", "dense_4h_to_h", "dense", "proj_out")
)


def split_dim(spec: TensorSpec) -> int:
    """The dimension: the last one of a row-parallel layer's weight, else the first."""
    parts = spec.name.split(".")
    layer = parts[-2] if len(parts) > 1 else ""
    return len(spec.shape) - 1 if layer in ROW_PARALLEL and len(spec.shape) > 1 else 0


def require_dims(split: SplitDim | None, specs: Iterable[TensorSpec]) -> None:
    """Raise ConfigError when a function tells a dimension that a tensor does not have; None tells none."""
    if split is None:
        return
    for spec in specs:
        dim = split(spec)
        if not 0 <= dim < max(1, len(spec.shape)):
            raise ConfigError(
                f"ctx= tells dimension {dim} of {spec.name!r}, whose shape is {list(spec.shape)}; they count from 0"
            )
