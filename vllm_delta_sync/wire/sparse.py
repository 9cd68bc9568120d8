"""The codecs that tell of the changed elements alone: which they are, by gaps or a bitmap, and their steps or values.

Does not choose between these and the codecs that need a whole block: `codecs` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import dtypes, frames
from vllm_delta_sync.wire.codec_rules import BITMAP, BITMAP_ABS, GAP, GAP_ABS
from vllm_delta_sync.wire.encoded import DecodedBlock, EncodedBlock
from vllm_delta_sync.wire.tensors import TensorSpec

CROWDED = 8  # where no more than one in so many elements changes, gaps are the smaller index

_BITMAPPED = {GAP: BITMAP, GAP_ABS: BITMAP_ABS}


def gap_of(changes: native.Changes) -> EncodedBlock:
    """The steps of changes of half floats, n ≥ 1."""
    index, value = native.encode_gaps(changes.positions), native.encode_steps(changes.old, changes.new)
    return EncodedBlock(GAP, len(changes.positions), _pack(index), _pack(value), (index.size, value.size))


def gap_block(positions: npt.NDArray[np.uint32], steps: npt.NDArray[np.uint16]) -> EncodedBlock:
    """Steps u16[n], none of them zero, at ascending positions u32[n] of a block of half floats; n ≥ 1."""
    zeros = np.zeros_like(steps)
    index, value = native.encode_gaps(positions), native.encode_steps(zeros, native.apply_steps(zeros, steps))
    return EncodedBlock(GAP, len(positions), _pack(index), _pack(value), (index.size, value.size))


def gap_abs_block(positions: npt.NDArray[np.uint32], values: Bits) -> EncodedBlock:
    """New bits uW[n] at ascending positions u32[n] of a block; n ≥ 1."""
    index, planes = native.encode_gaps(positions), _planes(values, values.itemsize)
    return EncodedBlock(GAP_ABS, len(positions), _pack(index), _pack(planes), (index.size, planes.size))


def bitmapped(block: EncodedBlock, positions: npt.NDArray[np.uint32], count: int) -> EncodedBlock:
    """A block of gaps, which are those of `positions` u32[n], with a bit for each of its `count` elements instead."""
    marks = np.zeros(count, np.bool_)
    marks[positions] = True
    index = np.packbits(marks, bitorder="little")
    return replace(block, codec=_BITMAPPED[block.codec], index=_pack(index), raw=(index.size, block.raw[1]))


def smaller_index(block: EncodedBlock, positions: npt.NDArray[np.uint32], count: int) -> EncodedBlock:
    """A block of gaps as it is or `bitmapped`, whichever is smaller."""
    if positions.size * CROWDED <= count:
        return block
    other = bitmapped(block, positions, count)
    return other if other.stored < block.stored else block


def smallest(spec: TensorSpec, changes: native.Changes, count: int) -> EncodedBlock:
    """The smallest of these codecs for changes of a block of `count` elements, n ≥ 1."""
    return smaller_index(_gaps(spec, changes), changes.positions, count)


def _gaps(spec: TensorSpec, changes: native.Changes) -> EncodedBlock:
    """By steps or by values."""
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


def decode_sparse(spec: TensorSpec, count: int, encoded: EncodedBlock, what: str) -> DecodedBlock:
    """Decode a block of one of these codecs, as `codecs.decode_encoded` does."""
    codec, changed = encoded.codec, encoded.changed
    # The caps were checked against `changed` and `count` with the table, so neither stream can ask for more than these.
    index = np.frombuffer(frames.decompress(encoded.index, encoded.raw[0], f"{what}, index stream"), np.uint8)
    raw = np.frombuffer(frames.decompress(encoded.value, encoded.raw[1], f"{what}, value stream"), np.uint8)
    try:
        marked = codec in (BITMAP, BITMAP_ABS)
        positions = _marked(index, changed, count) if marked else native.decode_gaps(index, changed, count)
        if codec in (GAP, BITMAP):
            return DecodedBlock(codec, positions, native.decode_steps(raw, changed), None)
    except MalformedObject as error:
        raise MalformedObject(f"{what}: {error}") from None
    planes = raw.reshape(spec.width, changed)
    values = np.ascontiguousarray(planes.T).reshape(-1).view(dtypes.by_name(spec.dtype).bits)
    return DecodedBlock(codec, positions, None, values)


def _marked(index: npt.NDArray[np.uint8], changed: int, count: int) -> npt.NDArray[np.uint32]:
    bits = np.unpackbits(index, bitorder="little")
    positions = np.flatnonzero(bits).astype(np.uint32)
    if positions.size != changed or positions[-1] >= count:
        raise MalformedObject(f"a bitmap with {positions.size} bits set, {changed} of the first {count} are stated")
    return positions
