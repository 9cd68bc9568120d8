"""The closed registry of codecs: encoding the changes of a block as the smallest of them, and decoding hostile blocks.

Does not apply changes: `gap` and `ctx` need old values, which only the caller has.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseNeeded, DigestMismatch, MalformedObject
from vllm_delta_sync.native import CtxModel
from vllm_delta_sync.wire import ctx, dtypes, frames
from vllm_delta_sync.wire.codec_rules import CTX, DENSE, GAP, GAP_ABS
from vllm_delta_sync.wire.ctx_order import moved, pattern
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec

DIGEST_BYTES = 16
TRIED = 4096  # changes that are coded as gaps to see whether all should be
CHEAPER = 0.85  # by so much their share may come out smaller than those of the whole block

Bits = npt.NDArray[Any]  # unsigned integers of a dtype's width


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block ready for a shard. `index` and `value` are its stored streams, `raw` their raw sizes in bytes.

    A ctx block has the model that it is coded with, by the same identity as others of its version.
    """

    codec: int
    changed: int
    index: Buffer
    value: Buffer
    raw: tuple[int, int]
    model: CtxModel | None = None

    @property
    def stored(self) -> int:
        """Bytes of the block in its shard."""
        return len(self.index) + len(self.value)

    def digest(self) -> bytes:
        """BLAKE2b-128 of the stored bytes."""
        return _digest(self.index, self.value)


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBlock:
    """Changes of a block: positions u32[n], ascending from its start; steps u16[n] (of half floats) or values uW[n]."""

    codec: int
    positions: npt.NDArray[np.uint32]
    steps: npt.NDArray[np.uint16] | None
    values: Bits | None

    def new_bits(self, old: Bits) -> Bits:
        """The new bits uW[n] of the elements at `positions`, of which `old` uW[n] are the bits before this version."""
        if self.steps is not None:
            return native.apply_steps(old, self.steps)
        assert self.values is not None, "a block decodes to steps or to values"
        return self.values


def _digest(*parts: Buffer) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What coding a block as `ctx` takes besides its changes."""

    model: CtxModel
    old: Bits  # uW[count], the whole block before the changes
    dim: int  # the dimension that ranks split


def encode_block(
    spec: TensorSpec,
    changes: native.Changes,
    start: int,
    count: int,
    current: Bits,
    context: Context | None = None,
) -> EncodedBlock:
    """Encode the changes in elements start … start+count−1 of a tensor as the smallest of the codecs that are possible.

    Args:
        changes: positions u32[n] relative to `start`, ascending, n ≥ 1, with old and new bits uW[n], all different.
        current: the new bits uW[count] of the whole block, for the dense codec.
        context: for the ctx codec.
    """
    changed, width = len(changes.positions), spec.width
    assert 1 <= changed <= count and len(current) == count, f"{spec.name} [{start}, +{count}): {changed} changes"
    size = count * width
    coded = ctx_of(spec, changes, start, context) if context is not None else None
    if coded is not None and not _gap_may_win(spec, changes, coded):
        return coded
    best = _sparse(spec, changes)
    if coded is not None and coded.stored <= best.stored:
        return coded
    return best if best.stored < size else dense_block(current, changed)


def gap_of(changes: native.Changes) -> EncodedBlock:
    """The steps of changes of half floats, n ≥ 1."""
    index, value = native.encode_gaps(changes.positions), native.encode_steps(changes.old, changes.new)
    return EncodedBlock(GAP, len(changes.positions), _pack(index), _pack(value), (index.size, value.size))


def ctx_of(spec: TensorSpec, changes: native.Changes, start: int, context: Context) -> EncodedBlock | None:
    """Changes, n ≥ 1, coded against the values before; None where that takes as much as a dense copy."""
    size = context.old.nbytes
    found = ctx.encode(context.model, spec, start, context.old, changes, context.dim, size)
    if found is None or len(found[0]) + len(found[1]) >= size:
        return None
    index, value = found
    return EncodedBlock(CTX, len(changes.positions), index, value.data, (len(index), len(value)), context.model)


def _gap_may_win(spec: TensorSpec, changes: native.Changes, coded: EncodedBlock) -> bool:
    """Whether gaps, which take a general compressor, are worth trying: judged by some in the middle of the block."""
    changed = len(changes.positions)
    if changed <= TRIED:
        return True
    middle = slice(changed // 2, changed // 2 + TRIED)
    positions = changes.positions[middle] - changes.positions[middle.start]
    trial = _sparse(spec, native.Changes(positions, changes.old[middle], changes.new[middle]))
    return trial.stored * changed * CHEAPER <= coded.stored * len(positions)


def gap_block(positions: npt.NDArray[np.uint32], steps: npt.NDArray[np.uint16]) -> EncodedBlock:
    """Steps u16[n], none of them zero, at ascending positions u32[n] of a block of half floats; n ≥ 1."""
    zeros = np.zeros_like(steps)
    index, value = native.encode_gaps(positions), native.encode_steps(zeros, native.apply_steps(zeros, steps))
    return EncodedBlock(GAP, len(positions), _pack(index), _pack(value), (index.size, value.size))


def gap_abs_block(positions: npt.NDArray[np.uint32], values: Bits) -> EncodedBlock:
    """New bits uW[n] at ascending positions u32[n] of a block; n ≥ 1."""
    index, planes = native.encode_gaps(positions), _planes(values, values.itemsize)
    return EncodedBlock(GAP_ABS, len(positions), _pack(index), _pack(planes), (index.size, planes.size))


def dense_block(values: Bits, changed: int) -> EncodedBlock:
    """The new bits uW[count] of a whole block, of which `changed` elements count as changed."""
    return EncodedBlock(DENSE, changed, b"", np.ascontiguousarray(values).tobytes(), (0, values.nbytes))


def _sparse(spec: TensorSpec, changes: native.Changes) -> EncodedBlock:
    """The smaller one of the codecs that tell of changes alone."""
    if not dtypes.by_name(spec.dtype).half:
        return gap_abs_block(changes.positions, changes.new)
    steps = gap_of(changes)
    # Steps of RL updates take a few bits each. Only where they take more than a byte can whole values be the smaller.
    if len(steps.value) <= steps.changed:
        return steps
    planes = _planes(changes.new, spec.width)
    packed = _pack(planes)
    if len(packed) >= len(steps.value):
        return steps
    return EncodedBlock(GAP_ABS, steps.changed, steps.index, packed, (steps.raw[0], planes.size))


def _pack(raw: npt.NDArray[np.uint8]) -> bytes:
    return frames.compress(raw.data)


def _planes(values: Bits, width: int) -> npt.NDArray[np.uint8]:
    little = np.ascontiguousarray(values, f"<u{width}")
    return np.ascontiguousarray(little.view(np.uint8).reshape(-1, width).T).reshape(-1)


def check_digest(block: Block, payload: Buffer) -> None:
    """Raise DigestMismatch unless `payload` has the size and digest that the table states for the block."""
    if len(payload) != block.stored or _digest(payload) != block.digest:
        raise DigestMismatch(
            f"block {block}: {len(payload)} bytes that are not the {block.stored} whose digest the table states; "
            "the shard was damaged after it was written"
        )


def encoded_of(block: Block, payload: Buffer) -> EncodedBlock:
    """The streams of a block in its stored bytes, once these are verified. Raises DigestMismatch."""
    check_digest(block, payload)
    view, at = memoryview(payload), block.length[0]
    return EncodedBlock(block.codec, block.changed, view[:at], view[at:], block.raw, block.model)


def decode_block(block: Block, payload: Buffer, old: Bits | None = None) -> DecodedBlock:
    """Verify and decode the stored bytes of a block whose row passed the rules of `VersionTable.from_bytes`.

    Args:
        old: the bits uW[count] of the whole block before the change, for codec ctx.

    Returns:
        positions u32[n] below `block.count` (dense: 0 … count−1) with steps u16[n] or values uW[n].

    Raises:
        DigestMismatch: the bytes are not those the table states.
        MalformedObject: a stream breaks docs/protocol.md; of a ctx block, or `old` is not what it was made from.
        BaseNeeded: codec ctx, without `old`.
    """
    return decode_encoded(block.spec, block.start, block.count, encoded_of(block, payload), f"block {block}", old)


def check_block(block: Block, payload: Buffer) -> None:
    """Verify the stored bytes of a block as far as that goes without its old values; raises as `decode_block` does."""
    if block.codec != CTX:
        decode_block(block, payload)
        return
    encoded = encoded_of(block, payload)
    ctx_header(block.spec, block.start, block.count, encoded, f"block {block}")


def ctx_header(spec: TensorSpec, start: int, count: int, encoded: EncodedBlock, what: str) -> ctx.CtxHeader:
    """How a ctx block is cut into tiles, and what each takes. Raises MalformedObject."""
    try:
        return ctx.read_header(spec, start, count, encoded.index, len(encoded.value))
    except MalformedObject as error:
        raise MalformedObject(f"{what}: {error}") from None


def decode_tiles(
    header: ctx.CtxHeader, encoded: EncodedBlock, old: Bits, wanted: npt.NDArray[np.uint8], what: str
) -> DecodedBlock:
    """Decode tiles of a ctx block: those of `wanted` u8[T], whose old bits are right in `old` uW[count].

    Raises MalformedObject for a stream that breaks docs/protocol.md, or old bits that are not what it was made from.
    """
    found = _decode_ctx(header, encoded, np.frombuffer(encoded.value, np.uint8), old, wanted, what)
    if wanted.all() and len(found.positions) != encoded.changed:
        raise MalformedObject(f"{what}: {len(found.positions)} changes, {encoded.changed} stated")
    return found


def decode_window(window: ctx.CtxWindow, encoded: EncodedBlock, old: Bits, what: str) -> DecodedBlock:
    """Decode some columns of a ctx block, of whose elements, row by row, `old` uW[rows · columns] are the bits.

    Raises as `decode_tiles` does.
    """
    header = window.header
    data = np.frombuffer(encoded.value, np.uint8)[window.data]
    found = _decode_ctx(header, encoded, data, old, np.ones(header.grid.tiles, np.uint8), what)
    return replace(found, positions=window.in_block(found.positions))


def _decode_ctx(
    header: ctx.CtxHeader,
    encoded: EncodedBlock,
    data: npt.NDArray[np.uint8],
    old: Bits,
    wanted: npt.NDArray[np.uint8],
    what: str,
) -> DecodedBlock:
    assert encoded.model is not None, f"{what}: a ctx block has a model"
    try:
        positions, steps = native.ctx_decode(
            encoded.model,
            pattern(header.dtype, old),
            header.grid,
            header.sizes,
            header.lanes,
            data,
            wanted,
            encoded.changed,
        )
    except MalformedObject as error:
        raise MalformedObject(f"{what}: {error}") from None
    if header.dtype.half:
        return DecodedBlock(CTX, positions, steps, None)
    return DecodedBlock(CTX, positions, None, moved(header.dtype, old[positions], steps))


def decode_encoded(
    spec: TensorSpec, start: int, count: int, encoded: EncodedBlock, what: str, old: Bits | None = None
) -> DecodedBlock:
    """Decode a block of `count` elements whose digest was checked and whose row passed the rules; else as above."""
    bits, changed = dtypes.by_name(spec.dtype).bits, encoded.changed
    if encoded.codec == CTX:
        if old is None:
            raise BaseNeeded(
                f"{what}: codec ctx is decoded against the values before the change, which are not at hand"
            )
        header = ctx_header(spec, start, count, encoded, what)
        return decode_tiles(header, encoded, old, np.ones(header.grid.tiles, np.uint8), what)
    if encoded.codec == DENSE:
        # A block may begin at any byte of its shard; native code wants whole elements aligned.
        values = np.require(np.frombuffer(encoded.value, bits), requirements="A")
        return DecodedBlock(DENSE, np.arange(count, dtype=np.uint32), None, values)
    # The caps were checked against `changed` and `count` with the table, so neither stream can ask for more than these.
    gaps = frames.decompress(encoded.index, encoded.raw[0], f"{what}, index stream")
    raw = np.frombuffer(frames.decompress(encoded.value, encoded.raw[1], f"{what}, value stream"), np.uint8)
    try:
        positions = native.decode_gaps(np.frombuffer(gaps, np.uint8), changed, count)
        if encoded.codec == GAP:
            return DecodedBlock(GAP, positions, native.decode_steps(raw, changed), None)
    except MalformedObject as error:
        raise MalformedObject(f"{what}: {error}") from None
    planes = raw.reshape(spec.width, changed)
    values = np.ascontiguousarray(planes.T).reshape(-1).view(bits)
    return DecodedBlock(GAP_ABS, positions, None, values)
