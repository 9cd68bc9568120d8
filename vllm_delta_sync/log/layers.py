"""Layers: all changes from one version to another in memory, as encoded blocks, and composing and inverting them.

Does not read or write a store, and does not choose which layers to make: `folding` does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseNeeded, VersionGap
from vllm_delta_sync.log import compose as blocks
from vllm_delta_sync.log.compose import Change, Held
from vllm_delta_sync.log.packing import TensorUpdate
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.codec_rules import CTX
from vllm_delta_sync.wire.codecs import encode_block, encoded_of
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import ObjectRef
from vllm_delta_sync.wire.state_hash import Lanes
from vllm_delta_sync.wire.table import Block, VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """A version at one end of a layer."""

    version: int
    state_root: str  # hex
    manifest: ObjectRef


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A tensor that a layer changes: its lanes u32[4] at the layer's end, and its blocks by their start."""

    spec: TensorSpec
    lanes: Lanes
    blocks: Sequence[Held]


@dataclass(frozen=True, eq=False)
class Layer:
    """All changes from one version to another, either way."""

    source: End
    to: End
    tensors: Mapping[str, Changed]  # by name; exactly those with blocks

    @cached_property
    def stored(self) -> int:
        """Bytes in memory, which are about those in a bucket."""
        return sum(held.stored for tensor in self.tensors.values() for held in tensor.blocks)

    def updates(self) -> list[TensorUpdate]:
        """The layer as it is packed into shards."""
        return [
            TensorUpdate(tensor.spec, tensor.lanes, [(held.start, held.count, held.encoded) for held in tensor.blocks])
            for tensor in self.tensors.values()
        ]


def of_payload(source: End, to: End, table: VersionTable, found: Iterable[tuple[Block, Buffer]]) -> Layer:
    """The layer of a table and the stored bytes of all its blocks. Raises DigestMismatch for a damaged block."""
    held: dict[int, list[Held]] = {}
    for block, payload in found:
        held.setdefault(block.tensor, []).append(Held(block.start, block.count, own(block, payload)))
    of_tensors = {table.tensors[tensor]: (table.hashes[tensor], rows) for tensor, rows in held.items()}
    return of_blocks(source, to, of_tensors)


def of_blocks(source: End, to: End, tensors: Mapping[TensorSpec, tuple[Lanes, Sequence[Held]]]) -> Layer:
    """The layer of blocks in any order, and of their tensors' lanes u32[4] at its end."""
    by_start = attrgetter("start")
    changed = (Changed(spec, lanes, sorted(rows, key=by_start)) for spec, (lanes, rows) in tensors.items())
    return _layer(source, to, changed)


def own(block: Block, payload: Buffer) -> EncodedBlock:
    """A block as it is stored, copied, so that a layer holds it and not the whole shard. Raises DigestMismatch."""
    found = encoded_of(block, payload)
    return replace(found, index=bytes(found.index), value=bytes(found.value))


def compose(first: Layer, second: Layer, *, threads: int = 1) -> Layer:
    """The first layer and then the second as one; elements that come back to their first bits by steps drop out.

    Holds, beside the three layers, the decoded blocks of one tensor per thread.

    Raises:
        VersionGap: the second does not begin in the state in which the first ends.
        BaseNeeded: an element's value is unknown, or a block would be larger than its dense copy.
    """
    if (first.to.version, first.to.state_root) != (second.source.version, second.source.state_root):
        raise VersionGap(
            f"changes from version {second.source.version} cannot follow those to version {first.to.version}: they do "
            "not begin where the first ones end"
        )

    def both(name: str) -> Changed | None:
        one, other = first.tensors.get(name), second.tensors.get(name)
        last = other or one
        assert last is not None, f"{name} is in neither layer"
        found = list(_composed(last.spec, one.blocks if one else (), other.blocks if other else ()))
        return Changed(last.spec, last.lanes, found) if found else None

    names = sorted({*first.tensors, *second.tensors})
    with ThreadPoolExecutor(threads, "delta-sync-fold") as pool:
        return _layer(first.source, second.to, filter(None, pool.map(both, names)))


def require_told(table: VersionTable) -> None:
    """Raise BaseNeeded where the blocks of a table, ctx blocks among them, do not tell their changes."""
    if any(block.codec == CTX for block in table.blocks):
        raise BaseNeeded("blocks of codec ctx do not tell their steps without the values before them")


def of_fold(layer: Layer) -> Layer:
    """The layer as a fold states it: one that was read from a single delta need not be so yet.

    Raises BaseNeeded for a layer with ctx blocks, which a fold does not have.
    """
    tensors = layer.tensors.values()
    changed = (replace(tensor, blocks=[blocks.of_fold(held) for held in tensor.blocks]) for tensor in tensors)
    return _layer(layer.source, layer.to, changed)


def inverse(layer: Layer, lanes: Mapping[str, Lanes]) -> Layer:
    """The way back. `lanes`: u32[4] of at least every tensor that the layer changes, at its source.

    Raises BaseNeeded where a block is known by its values only; `between` gives the way back then.
    """

    def back(tensor: Changed) -> Changed:
        turned = []
        for held in tensor.blocks:
            undone = blocks.encode(
                tensor.spec, held.start, held.count, blocks.inverse(blocks.decode(tensor.spec, held))
            )
            assert undone is not None, "an inverse changes as many elements"
            turned.append(undone)
        return Changed(tensor.spec, lanes[tensor.spec.name], turned)

    return _layer(layer.to, layer.source, map(back, layer.tensors.values()))


def between(
    source: End, to: End, old: Mapping[str, tuple[TensorSpec, Bits]], new: Mapping[str, tuple[TensorSpec, Bits]]
) -> Layer:
    """The layer from one whole model to another (name → (spec, bits uW[numel])), with equal specs."""

    def changed(spec: TensorSpec, before: Bits, after: Bits) -> Changed:
        found = []
        for start, count in split_blocks(spec):
            part = slice(start, start + count)
            changes = native.diff(before[part], after[part], advance=False)
            if changes.positions.size:
                encoded = encode_block(spec, changes, start, count, after[part])
                found.append(blocks.of_fold(blocks.hold(spec, start, count, encoded, changes)))
        return Changed(spec, state_hash.of_tensor(spec, after), found)

    tensors = (changed(spec, old[name][1].reshape(-1), bits.reshape(-1)) for name, (spec, bits) in new.items())
    return _layer(source, to, (tensor for tensor in tensors if tensor.blocks))


def _layer(source: End, to: End, tensors: Iterable[Changed]) -> Layer:
    return Layer(source, to, {tensor.spec.name: tensor for tensor in tensors})


def _composed(spec: TensorSpec, first: Sequence[Held], second: Sequence[Held]) -> Iterator[Held]:
    """The blocks of both together, cut wherever a block of either begins or ends."""
    edges = sorted({edge for held in (*first, *second) for edge in (held.start, held.start + held.count)})
    left, right = dict(_pieces(spec, first, edges)), dict(_pieces(spec, second, edges))
    for start, end in pairwise(edges):
        one, other = left.pop(start, None), right.pop(start, None)
        alone = one or other
        if one is not None and other is not None:
            together = blocks.then(_decoded(spec, one), _decoded(spec, other))
            found = blocks.encode(spec, start, end - start, together)
        elif isinstance(alone, Change):
            found = blocks.encode(spec, start, end - start, alone)
        else:
            found = alone
        if found is not None:
            yield blocks.of_fold(found)


def _decoded(spec: TensorSpec, piece: Held | Change) -> Change:
    return blocks.decode(spec, piece) if isinstance(piece, Held) else piece


def _pieces(spec: TensorSpec, held: Sequence[Held], edges: Sequence[int]) -> Iterator[tuple[int, Held | Change]]:
    """(start, block or part of one) with no edge inside; a block that is not cut stays encoded."""
    for block in held:
        inner = edges[bisect_left(edges, block.start) : bisect_right(edges, block.start + block.count)]
        if len(inner) == 2:
            yield block.start, block
            continue
        change = blocks.decode(spec, block)
        for start, stop in pairwise(inner):
            yield start, blocks.cut(change, start - block.start, stop - start)
