"""How many bytes one update takes on the wire, by codec: all that is uploaded of it but the manifest.

Does not measure time, and decodes what it encoded before it counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.bench.apply import Step, read_step
from vllm_delta_sync.log.packing import TensorUpdate, pack
from vllm_delta_sync.native import Changes
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.trainer.splits import split_dim
from vllm_delta_sync.wire import ctx, shard
from vllm_delta_sync.wire.codecs import Context, EncodedBlock, decode_encoded, dense_block, encode_block
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks


@dataclass(frozen=True)
class Row:
    """One codec."""

    name: str
    bytes: int  # of all shards: headers, table, models, blocks
    bytes_per_change: float


@dataclass(frozen=True)
class WireSizes:
    """What an update takes, in bands for 16 ranks."""

    changed: int  # elements
    density: float  # of all elements
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Part:
    """A block that changes."""

    spec: TensorSpec
    start: int
    old: Bits
    changes: Changes

    @property
    def new(self) -> Bits:
        bits = self.old.copy()
        bits[self.changes.positions] = self.changes.new
        return bits


def measure(old: Path, new: Path) -> WireSizes:
    """Encode the step between two bf16 checkpoints with each codec, and decode it again.

    Rows: `ctx` and `gap`, as a publisher with and without `ctx=True` writes it, and `dense`.
    """
    step = read_step(old, new)
    parts = list(_parts(step))
    some = ctx.chosen(parts)
    model = ctx.make_model(
        lambda: (ctx.Sample(part.spec, part.start, part.old, part.changes, split_dim(part.spec)) for part in some),
        len(some) / len(parts),
    )
    coded = {
        "ctx": [_encode(part, Context(model, part.old, split_dim(part.spec))) for part in parts],
        "gap": [_encode(part, None) for part in parts],
        "dense": [dense_block(part.new, part.changes.positions.size) for part in parts],
    }
    rows = []
    for name, blocks in coded.items():
        _check(parts, blocks)
        size = _bytes(parts, blocks)
        rows.append(Row(name, size, size / step.changed))
    return WireSizes(step.changed, step.changed / sum(spec.numel for spec in step.specs), tuple(rows))


def _parts(step: Step) -> Iterator[_Part]:
    for spec, live, changes in zip(step.specs, step.live, step.changes, strict=True):
        for start, count in split_blocks(spec):
            low, high = np.searchsorted(changes.positions, (start, start + count))
            if low < high:
                positions = changes.positions[low:high] - np.uint32(start)
                own = Changes(positions, changes.old[low:high], changes.new[low:high])
                yield _Part(spec, start, live[start : start + count], own)


def _encode(part: _Part, context: Context | None) -> EncodedBlock:
    return encode_block(part.spec, part.changes, part.start, part.old.size, part.new, context)


def _check(parts: list[_Part], blocks: list[EncodedBlock]) -> None:
    for part, block in zip(parts, blocks, strict=True):
        found = decode_encoded(part.spec, part.start, part.old.size, block, part.spec.name, part.old)
        bits = part.old.copy()
        bits[found.positions] = found.new_bits(bits[found.positions])
        assert not native.diff(bits, part.new, advance=False).positions.size, f"{part.spec.name}: decodes to other bits"


def _bytes(parts: list[_Part], blocks: list[EncodedBlock]) -> int:
    by_tensor: dict[TensorSpec, list[tuple[int, int, EncodedBlock]]] = {}
    for part, block in zip(parts, blocks, strict=True):
        by_tensor.setdefault(part.spec, []).append((part.start, part.old.size, block))
    # A table's hashes are as good as random, and so are these.
    random = np.random.default_rng(0)
    updates = [TensorUpdate(spec, random.integers(0, 1 << 32, 4, np.uint32), rows) for spec, rows in by_tensor.items()]
    packed, ends = pack(updates, shard.TARGET_BYTES), Ends("0" * 32, 0, 1)
    table = packed.table.to_bytes()
    files = (
        shard.pack_shard(ends, payloads, table if number == 0 else None)[0]
        for number, payloads in enumerate(packed.shards)
    )
    return sum(len(file) for file in files)
