"""The table of a version: its tensors with their state hashes, and its blocks.

Does not read blocks' bytes, and does not know the manifest it belongs to: `consistency.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native import CtxModel
from vllm_delta_sync.wire import columns, dtypes, frames
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.tensors import TensorSpec

MAX_RAW_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """One row of the block table: changes in elements start … start+count−1 of a tensor, and where their bytes are."""

    tensor: int  # index into the table's tensors
    spec: TensorSpec
    start: int  # elements
    count: int  # elements
    codec: int
    changed: int  # elements
    shard: int  # index into the manifest's shards
    offset: int  # bytes from the shard's data_start
    length: tuple[int, int]  # stored bytes of the index stream and of the value stream
    raw: tuple[int, int]  # the same, decompressed
    digest: bytes  # BLAKE2b-128 of the stored bytes
    model: CtxModel | None = None  # what a ctx block is coded with

    @property
    def stored(self) -> int:
        """Bytes of the block in its shard."""
        return self.length[0] + self.length[1]

    def __str__(self) -> str:
        return f"{self.spec.name!r} [{self.start}, {self.start + self.count})"


@dataclass(frozen=True, slots=True, eq=False)
class VersionTable:
    """Tensors sorted by name, their state hashes u32[T, 4] after the version, and blocks sorted by (tensor, start)."""

    tensors: tuple[TensorSpec, ...]
    hashes: npt.NDArray[np.uint32]
    blocks: tuple[Block, ...]

    def to_bytes(self) -> bytes:
        """The compressed table file."""
        raw = columns.pack(self._columns())
        assert len(raw) <= MAX_RAW_BYTES, f"a table of {len(raw)} bytes"
        return frames.compress(raw)

    def _columns(self) -> columns.Columns:
        names = "".join(spec.name + "\n" for spec in self.tensors).encode()
        sizes = [n for spec in self.tensors for n in spec.shape]
        rows = self.blocks
        # By identity: a model is made once for all blocks that it codes.
        models = list({id(row.model): row.model for row in rows if row.model is not None}.values())
        number = {id(model): index for index, model in enumerate(models)}
        return {
            "tensors.names": np.frombuffer(names, np.uint8),
            "tensors.dtype": np.array([dtypes.by_name(spec.dtype).code for spec in self.tensors], np.uint8),
            "tensors.rank": np.array([len(spec.shape) for spec in self.tensors], np.uint8),
            "tensors.shape": np.array(sizes, np.int64),
            "tensors.hash": np.asarray(self.hashes, np.uint32).reshape(len(self.tensors), 4),
            "blocks.tensor": np.array([row.tensor for row in rows], np.uint32),
            "blocks.start": np.array([row.start for row in rows], np.uint64),
            "blocks.count": np.array([row.count for row in rows], np.uint64),
            "blocks.codec": np.array([row.codec for row in rows], np.uint8),
            "blocks.changed": np.array([row.changed for row in rows], np.uint64),
            "blocks.shard": np.array([row.shard for row in rows], np.uint32),
            "blocks.offset": np.array([row.offset for row in rows], np.uint64),
            "blocks.length": np.array([row.length for row in rows], np.uint64).reshape(-1, 2),
            "blocks.raw": np.array([row.raw for row in rows], np.uint64).reshape(-1, 2),
            "blocks.digest": np.frombuffer(b"".join(row.digest for row in rows), np.uint8).reshape(-1, 16),
            "blocks.model": np.array([number.get(id(row.model), 0) for row in rows], np.uint8),
            **columns.model_columns(models),
        }

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "table") -> VersionTable:
        """Read a compressed table file, checking every rule that needs nothing else; MalformedObject names `what`."""
        raw = frames.content_size(data, what)
        if raw > MAX_RAW_BYTES:
            raise MalformedObject(f"{what}: a table of {raw} raw bytes, at most {MAX_RAW_BYTES} are allowed")
        found = columns.unpack(frames.decompress(data, raw, what), what)
        tensors = columns.read_tensors(found, what)
        columns.check_blocks(found, tensors, what)
        models = columns.read_models(found, what)
        return cls(tensors, found["tensors.hash"].astype(np.uint32), _blocks(found, tensors, models))

    def by_shard(self) -> dict[int, list[Block]]:
        """The blocks of each shard that has any, by the shard's index, ascending."""
        found: dict[int, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.shard, []).append(block)
        return dict(sorted(found.items()))

    def require_known(self, base: Mapping[str, TensorSpec], what: str) -> None:
        """Raise MalformedObject unless the base lists every tensor of this table with the same dtype and shape."""
        for spec in self.tensors:
            known = base.get(spec.name)
            if known != spec:
                stated = f"{known.dtype} {list(known.shape)}" if known else "no such tensor"
                raise MalformedObject(
                    f"{what}: tensor {spec.name!r} is {spec.dtype} {list(spec.shape)}, but the base has {stated}"
                )


def _blocks(found: columns.Columns, tensors: tuple[TensorSpec, ...], models: tuple[CtxModel, ...]) -> tuple[Block, ...]:
    digests = found["blocks.digest"].tobytes()
    names = ("tensor", "start", "count", "codec", "changed", "shard", "offset", "length", "raw", "model")
    rows = zip(*(found["blocks." + name].tolist() for name in names), strict=True)
    return tuple(
        Block(
            tensor=tensor,
            spec=tensors[tensor],
            start=start,
            count=count,
            codec=codec,
            changed=changed,
            shard=shard,
            offset=offset,
            length=(length[0], length[1]),
            raw=(raw[0], raw[1]),
            digest=digests[16 * row : 16 * row + 16],
            model=models[model] if codec == CTX else None,
        )
        for row, (tensor, start, count, codec, changed, shard, offset, length, raw, model) in enumerate(rows)
    )
