"""The closed registry of codecs: encoding the changes of a block as the smallest of them, and decoding hostile blocks.

Does not apply changes: `gap` and `ctx` need old values, which only the caller has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseNeeded, DigestMismatch, MalformedObject
from vllm_delta_sync.native import CtxModel
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import ctx, dtypes
from vllm_delta_sync.wire.codec_rules import CTX, DENSE
from vllm_delta_sync.wire.ctx_order import pattern
from vllm_delta_sync.wire.encoded import DecodedBlock, EncodedBlock, digest_of
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.sparse import decode_sparse, smallest
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec

TRIED = 512  # changes that are coded as gaps to see whether all should be
CHEAPER = 0.7  # by so much those of the whole block may come out smaller than their share


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
    best = smallest(spec, changes, count)
    if coded is not None and coded.stored <= best.stored:
        return coded
    return best if best.stored < size else dense_block(current, changed)


def ctx_of(spec: TensorSpec, changes: native.Changes, start: int, context: Context) -> EncodedBlock | None:
    """Changes, n ≥ 1, coded against the values before; None where that takes as much as a dense copy."""
    size = context.old.nbytes
    found = ctx.encode(context.model, spec, start, context.old, changes, context.dim, size)
    if found is None or len(found[0]) + len(found[1]) >= size:
        return None
    index, value = found
    return EncodedBlock(CTX, len(changes.positions), index, value, (len(index), len(value)), context.model)


def _gap_may_win(spec: TensorSpec, changes: native.Changes, coded: EncodedBlock) -> bool:
    """Whether gaps, which take a general compressor, are worth trying: judged by some in the middle of the block."""
    changed = len(changes.positions)
    if changed <= TRIED:
        return True
    middle = slice(changed // 2, changed // 2 + TRIED)
    positions = changes.positions[middle] - changes.positions[middle.start]
    few = native.Changes(positions, changes.old[middle], changes.new[middle])
    trial = smallest(spec, few, int(positions[-1]) + 1)
    return trial.stored * changed * CHEAPER <= coded.stored * len(positions)


def dense_block(values: Bits, changed: int) -> EncodedBlock:
    """The new bits uW[count] of a whole block, of which `changed` elements count as changed."""
    return EncodedBlock(DENSE, changed, b"", np.ascontiguousarray(values).tobytes(), (0, values.nbytes))


def check_digest(block: Block, payload: Buffer) -> None:
    """Raise DigestMismatch unless `payload` has the size and digest that the table states for the block."""
    if len(payload) != block.stored or digest_of(payload) != block.digest:
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
    header: ctx.CtxHeader, encoded: EncodedBlock, old: Bits, wanted: npt.NDArray[np.uint8] | None, what: str
) -> DecodedBlock:
    """Decode tiles of a ctx block: all, or those of `wanted` u8[T], whose old bits are right in `old` uW[count].

    Raises MalformedObject for a stream that breaks docs/protocol.md, or old bits that are not what it was made from.
    """
    found = _decode_ctx(header, encoded, np.frombuffer(encoded.value, np.uint8), old, wanted, what)
    return _all_stated(found, encoded, what) if wanted is None or wanted.all() else found


def decode_window(window: ctx.CtxWindow, encoded: EncodedBlock, old: Bits, what: str) -> DecodedBlock:
    """Decode some columns of a ctx block, of whose elements, row by row, `old` uW[rows · columns] are the bits.

    Raises as `decode_tiles` does.
    """
    header = window.header
    data = np.frombuffer(encoded.value, np.uint8)[window.data]
    found = _decode_ctx(header, encoded, data, old, None, what)
    if header.grid.row_length == window.row_length:
        return _all_stated(found, encoded, what)
    return replace(found, positions=window.in_block(found.positions))


def _all_stated(found: DecodedBlock, encoded: EncodedBlock, what: str) -> DecodedBlock:
    if len(found.positions) != encoded.changed:
        raise MalformedObject(f"{what}: {len(found.positions)} changes, {encoded.changed} stated")
    return found


def _decode_ctx(
    header: ctx.CtxHeader,
    encoded: EncodedBlock,
    data: npt.NDArray[np.uint8],
    old: Bits,
    wanted: npt.NDArray[np.uint8] | None,
    what: str,
) -> DecodedBlock:
    assert encoded.model is not None, f"{what}: a ctx block has a model"
    bits, integer = old, header.dtype.integer
    if integer:
        bits = pattern(header.dtype, old)
    try:
        positions, values = native.ctx_decode(
            encoded.model, bits, header.grid, header.stated, data, encoded.changed, wanted
        )
    except MalformedObject as error:
        raise MalformedObject(f"{what}: {error}") from None
    return DecodedBlock(CTX, positions, None, pattern(header.dtype, values) if integer else values)


def decode_encoded(
    spec: TensorSpec, start: int, count: int, encoded: EncodedBlock, what: str, old: Bits | None = None
) -> DecodedBlock:
    """Decode a block of `count` elements whose digest was checked and whose row passed the rules; else as above."""
    bits = dtypes.by_name(spec.dtype).bits
    if encoded.codec == CTX:
        if old is None:
            raise BaseNeeded(
                f"{what}: codec ctx is decoded against the values before the change, which are not at hand"
            )
        header = ctx_header(spec, start, count, encoded, what)
        return decode_tiles(header, encoded, old, None, what)
    if encoded.codec == DENSE:
        # A block may begin at any byte of its shard; native code wants whole elements aligned.
        values = np.require(np.frombuffer(encoded.value, bits), requirements="A")
        return DecodedBlock(DENSE, np.arange(count, dtype=np.uint32), None, values)
    return decode_sparse(spec, count, encoded, what)
