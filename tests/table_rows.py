"""A table's row of an encoded block, and the block's bytes as its shard has them.

Holds no assertions.
"""

from __future__ import annotations

from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec


def row_of(spec: TensorSpec, encoded: EncodedBlock, start: int = 0, count: int | None = None) -> tuple[Block, bytes]:
    """The first block of the first shard, of the first tensor; `count` elements from `start`, or the whole tensor."""
    block = Block(
        tensor=0,
        spec=spec,
        start=start,
        count=spec.numel if count is None else count,
        codec=encoded.codec,
        changed=encoded.changed,
        shard=0,
        offset=0,
        length=(len(encoded.index), len(encoded.value)),
        raw=encoded.raw,
        digest=encoded.digest(),
        model=encoded.model,
    )
    return block, bytes(encoded.index) + bytes(encoded.value)
