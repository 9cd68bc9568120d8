"""Composing the changes of one block: one after the other, or backwards, from what the wire holds of them alone.

Does not know versions, tables or stores: `layers` does. Does not have the values before a change unless they are told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseNeeded
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import dtypes
from vllm_delta_sync.wire.codec_rules import BITMAP, CTX, DENSE, GAP, SLACK_BYTES
from vllm_delta_sync.wire.codecs import decode_encoded, dense_block
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.sparse import gap_abs_block, gap_block, gap_of, smaller_index
from vllm_delta_sync.wire.tensors import TensorSpec

Positions = npt.NDArray[np.uint32]
Steps = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What becomes of the elements of a block; at least one of `steps` and `values` is known.

    Steps add up, so a change known by its steps can follow, precede or undo any other such. Values stand for
    themselves, so a change known by its values can follow anything that does not touch other elements.
    """

    positions: Positions  # u32[n], ascending from the block's start
    steps: Steps | None  # u16[n], of half floats: none is zero
    values: Bits | None  # uW[n], the new bits
    whole: Bits | None = None  # uW[count], the new bits of every element of the block, also of those not at `positions`


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A block as it is kept in memory: as in a shard and, where its codec is another and they are known, as steps."""

    start: int  # elements
    count: int  # elements
    encoded: EncodedBlock
    steps: EncodedBlock | None = None

    @property
    def stored(self) -> int:
        """Bytes in memory."""
        return self.encoded.stored + (self.steps.stored if self.steps else 0)


def hold(spec: TensorSpec, start: int, count: int, encoded: EncodedBlock, changes: native.Changes) -> Held:
    """A block encoded from these changes, with its steps beside it where it has some and does not consist of them.

    One of codec ctx, of which nothing can be composed, is held as steps or values instead.
    """
    half = dtypes.by_name(spec.dtype).half
    steps = gap_of(changes) if half and encoded.codec not in (GAP, BITMAP) else None
    if encoded.codec != CTX:
        return Held(start, count, encoded, steps)
    if steps is not None and _is_small(spec, count, steps):
        return Held(start, count, smaller_index(steps, changes.positions, count))
    moves = native.decode_steps(native.encode_steps(changes.old, changes.new), encoded.changed) if half else None
    try:
        found = encode(spec, start, count, Change(changes.positions, moves, changes.new))
    except BaseNeeded:  # larger than a dense copy: it can be in no fold
        return Held(start, count, encoded)
    assert found is not None, "a block has changes"
    return found


def _is_small(spec: TensorSpec, count: int, steps: EncodedBlock) -> bool:
    """Whether neither values nor a dense copy need be tried: as in wire.sparse."""
    return len(steps.value) <= steps.changed and steps.stored <= count * spec.width


def decode(spec: TensorSpec, held: Held) -> Change:
    """The change that a held block is.

    Raises MalformedObject when a stream breaks docs/protocol.md, BaseNeeded for a block of codec ctx.
    """
    what = f"block {spec.name!r} [{held.start}, {held.start + held.count})"
    found = decode_encoded(spec, held.start, held.count, held.encoded, what)
    whole = found.values if held.encoded.codec == DENSE else None
    if held.steps is None:
        return Change(found.positions, found.steps, found.values, whole)
    beside = decode_encoded(spec, held.start, held.count, held.steps, what)
    if whole is None:
        assert np.array_equal(beside.positions, found.positions), f"{what}: its steps are at other positions"
        return Change(found.positions, beside.steps, found.values)
    return Change(beside.positions, beside.steps, whole[beside.positions], whole)


def encode(spec: TensorSpec, start: int, count: int, change: Change) -> Held | None:
    """The smallest block that is this change; None when nothing changes.

    Raises BaseNeeded when it is larger than its dense copy, for which values are missing.
    """
    if not change.positions.size:
        return None
    size = count * spec.width
    steps = None
    if change.steps is not None:
        steps = smaller_index(gap_block(change.positions, change.steps), change.positions, count)
    if steps is not None and _is_small(spec, count, steps):
        return Held(start, count, steps)
    choices = [] if steps is None else [steps]
    if change.values is not None:
        values = gap_abs_block(change.positions, change.values)
        choices.append(smaller_index(values, change.positions, count))
    whole = change.values if change.positions.size == count else change.whole
    if whole is not None:
        choices.append(dense_block(whole, count))
    best = min(choices, key=lambda block: block.stored)
    if best.stored > size + SLACK_BYTES:
        raise BaseNeeded(
            f"block {spec.name!r} [{start}, {start + count}): {best.changed} changes take {best.stored} bytes, more "
            f"than the {size} of the whole block, whose values these changes do not tell; fold fewer versions, or with "
            "the base"
        )
    return Held(start, count, best, None if best is steps else steps)


def then(first: Change, second: Change) -> Change:
    """The first change and then the second, of the same block.

    Raises BaseNeeded where a step meets an element whose value before is unknown while others are known by value only.
    """
    whole = _whole(first, second)
    if first.steps is not None and second.steps is not None:
        positions, steps = native.merge(first.positions, first.steps, second.positions, second.steps, add=True)
        values = whole[positions] if whole is not None else None
        if values is None and (found := _values(first, second)) is not None:
            values = found[1][np.searchsorted(found[0], positions)]
        return Change(positions, steps, values, whole)
    found = _values(first, second)
    if found is None:
        raise BaseNeeded(
            "one change gives new values and the other steps, and a step from an unknown value leads to an unknown one"
        )
    return Change(found[0], None, found[1], whole)


def _whole(first: Change, second: Change) -> Bits | None:
    if second.whole is not None or first.whole is None:
        return second.whole
    whole = first.whole.copy()
    before = whole[second.positions]
    whole[second.positions] = _after(before, second)
    return whole


def _after(before: Bits, change: Change) -> Bits:
    if change.values is not None:
        return change.values
    assert change.steps is not None, "a change is known by its steps or its values"
    return native.apply_steps(before, change.steps)


def _values(first: Change, second: Change) -> tuple[Positions, Bits] | None:
    """The positions of both and the values there after both, if all are known."""
    if first.values is None and second.values is None:
        return None
    later = second.values
    if later is None:
        before = _at(first, second.positions)
        if before is None:
            return None
        later = _after(before, second)
    if first.values is not None:
        return native.merge(first.positions, first.values, second.positions, later, add=False)
    # What the first changed by steps is known afterwards only where the second says so.
    return (second.positions, later) if _within(first.positions, second.positions) is not None else None


def _at(change: Change, positions: Positions) -> Bits | None:
    """The values at these positions after a change, if all are known."""
    if change.whole is not None:
        return change.whole[positions]
    where = _within(positions, change.positions)
    return change.values[where] if where is not None and change.values is not None else None


def _within(few: Positions, many: Positions) -> npt.NDArray[np.intp] | None:
    """Where each of `few` is among `many`; None unless all are."""
    if few.size > many.size:
        return None
    where = np.searchsorted(many, few)
    inside = not few.size or (int(where[-1]) < many.size and np.array_equal(many[where], few))
    return where if inside else None


def inverse(change: Change) -> Change:
    """The change that undoes this one. Raises BaseNeeded when its steps are not known."""
    if change.steps is None:
        raise BaseNeeded("a change that gives new values does not tell the old ones, to which a way back would lead")
    return Change(change.positions, np.uint16(0) - change.steps, None)


def cut(change: Change, start: int, count: int) -> Change:
    """The part of a change in elements start … start+count−1 of its block, as a change of that range alone."""
    low, high = np.searchsorted(change.positions, (start, start + count))
    part = slice(int(low), int(high))
    return Change(
        change.positions[part] - np.uint32(start),
        None if change.steps is None else change.steps[part],
        None if change.values is None else change.values[part],
        None if change.whole is None else change.whole[start : start + count],
    )


def of_fold(held: Held) -> Held:
    """The block as a fold states it: a dense one changes its whole range, whoever else had counted.

    A fold has no ctx blocks: who folds does not have the values before them. Raises BaseNeeded for such a one.
    """
    if held.encoded.codec == CTX:
        raise BaseNeeded("a block of codec ctx does not tell its steps without the values before them")
    if held.encoded.codec != DENSE or held.encoded.changed == held.count:
        return held
    return replace(held, encoded=replace(held.encoded, changed=held.count))
