"""Placing the encoded blocks of a version or a fold in shards, and the table that says where each went.

Does not write anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.state_hash import Lanes
from vllm_delta_sync.wire.table import Block, VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

_HEADER_BYTES = 512  # more than a shard's header takes


@dataclass(frozen=True, slots=True, eq=False)
class TensorUpdate:
    """A tensor that changed: its lanes u32[4] after the version, and its blocks (start, count, encoded), ascending."""

    spec: TensorSpec
    lanes: Lanes
    blocks: Sequence[tuple[int, int, EncodedBlock]]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The table of a version or a fold, and for each shard, of which there is always one, the streams that follow one
    another in it.
    """

    table: VersionTable
    shards: tuple[list[Buffer], ...]


def pack(updates: Sequence[TensorUpdate], shard_bytes: int) -> Packed:
    """Place blocks in table order into shards of at most `shard_bytes`, their table not counted.

    A larger block has a shard of its own.
    """
    ordered = sorted(updates, key=lambda update: update.spec.name.encode())
    shards: list[list[Buffer]] = [[]]
    rows: list[Block] = []
    offset = 0
    for tensor, update in enumerate(ordered):
        for start, count, encoded in update.blocks:
            if shards[-1] and offset + encoded.stored > shard_bytes - _HEADER_BYTES:
                shards.append([])
                offset = 0
            shards[-1] += [encoded.index, encoded.value]
            row = Block(
                tensor=tensor,
                spec=update.spec,
                start=start,
                count=count,
                codec=encoded.codec,
                changed=encoded.changed,
                shard=len(shards) - 1,
                offset=offset,
                length=(len(encoded.index), len(encoded.value)),
                raw=encoded.raw,
                digest=encoded.digest(),
                model=encoded.model,
            )
            rows.append(row)
            offset += encoded.stored
    hashes = np.array([update.lanes for update in ordered], np.uint32).reshape(-1, 4)
    return Packed(VersionTable(tuple(update.spec for update in ordered), hashes, tuple(rows)), tuple(shards))
