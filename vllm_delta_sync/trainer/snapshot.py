"""The published state, held bit by bit: finds what a model changed, moves on with it, and takes a version back.

Does not encode or send anything; does not know versions' numbers.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
import torch

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseMismatch
from vllm_delta_sync.trainer import source
from vllm_delta_sync.trainer.frozen import FrozenState
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks

CHUNK = 1 << 20  # elements cast and compared at a time: still in cache, and large beside the cost of a call

FROZEN_BYTES = 256 << 20  # of changes that a frozen state may always keep


@dataclass(frozen=True, slots=True, eq=False)
class BlockDelta:
    """What one version changed in one block of one tensor: its symbols, and its undo."""

    spec: TensorSpec
    start: int  # the block's first element in the flat tensor
    count: int  # elements in the block
    changes: native.Changes  # positions within the block, at least one
    lanes: state_hash.Lanes  # what the change adds to the tensor's state hash
    current: source.Bits | None  # the whole block after the change, uW[count], where a dense copy may be smallest


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What one version changed: blocks in the order of the tensors' names and of their elements."""

    blocks: tuple[BlockDelta, ...]
    before: Mapping[TensorSpec, state_hash.Lanes]  # state hashes, of the tensors that changed, before the version
    after: Mapping[TensorSpec, state_hash.Lanes]  # and after it
    state_root: str  # of the whole model after the version

    @property
    def changed(self) -> int:
        """Elements that changed."""
        return sum(block.changes.positions.size for block in self.blocks)


def dense_may_win(changed: int, count: int, width: int) -> bool:
    """Whether a raw copy of a block may be smaller than its changes.

    Their worst case is a gap byte and a value each, incompressible: two zstd frames then take at most n + n/256 + 128.
    """
    raw = changed * (width + 1) + count // 255 + 1
    return raw + raw // 256 + 128 >= count * width


class Snapshot:
    """The bits and the state hash of every tensor of the base, as last published.

    Holds one copy of the model in the base's dtypes. Not thread-safe but for `freeze`: one caller at a time.

    Args:
        tensors: name → (spec, bits uW[numel]); the bits are kept and written to, so they must be nobody else's.
        threads: how many blocks are compared at a time.
    """

    def __init__(self, tensors: Mapping[str, tuple[TensorSpec, source.Bits]], threads: int) -> None:
        self._bits = {name: bits.reshape(-1) for name, (_, bits) in tensors.items()}
        self._specs = {name: spec for name, (spec, _) in tensors.items()}
        self._threads = threads
        self._scratch = source.Scratch()
        self._moving = threading.Lock()  # held while bits and lanes change, for `freeze` may be called from elsewhere
        self._frozen: WeakSet[FrozenState] = WeakSet()
        with ThreadPoolExecutor(threads, "delta-sync-hash") as pool:
            lanes = pool.map(lambda name: state_hash.of_tensor(self._specs[name], self._bits[name]), self._bits)
            self._lanes = dict(zip(self._specs.values(), lanes, strict=True))
        self.elements = sum(spec.numel for spec in self._specs.values())

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the base by name."""
        return self._specs

    @property
    def lanes(self) -> Mapping[TensorSpec, state_hash.Lanes]:
        """The state hash of every tensor."""
        return self._lanes

    @property
    def tensors(self) -> dict[str, tuple[TensorSpec, source.Bits]]:
        """The state itself: name → (spec, bits uW[numel]). Views that change with the snapshot."""
        return {name: (spec, self._bits[name]) for name, spec in self._specs.items()}

    def advance(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Delta:
        """Find every element whose bits differ from `weights`, and move on to them.

        Args:
            weights: (name in the base, tensor) for every tensor of the base, any strides, device and castable dtype.
                A name may come again with the same content.

        Raises BaseMismatch when a tensor is missing, has another shape or a dtype that cannot be cast, or comes again
        with other content. After that and any other exception the snapshot is what it was.
        """
        with self._moving:
            delta = self._advance(weights)
            try:
                for frozen in self._frozen:
                    frozen.moved_on(delta)
            except BaseException:
                self._take_back(delta)
                for frozen in self._frozen:
                    frozen.stayed(delta)
                raise
            return delta

    def _advance(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Delta:
        found: list[BlockDelta] = []  # by the workers, who append a block in the moment they have moved it on
        before: dict[TensorSpec, state_hash.Lanes] = {}
        try:
            with ThreadPoolExecutor(self._threads, "delta-sync-diff") as pool:
                self._find(weights, found, pool)
            found.sort(key=lambda block: (block.spec.name.encode(), block.start))
            before.update((block.spec, self._lanes[block.spec]) for block in found)
            for block in found:
                self._lanes[block.spec] = state_hash.add(self._lanes[block.spec], block.lanes)
            after = {spec: self._lanes[spec] for spec in before}
            return Delta(tuple(found), before, after, state_hash.state_root(self._lanes))
        except BaseException:
            self._restore(found)
            self._lanes.update(before)
            raise

    def _find(
        self, weights: Iterable[tuple[str, torch.Tensor]], found: list[BlockDelta], pool: ThreadPoolExecutor
    ) -> None:
        running: deque[Future[None]] = deque()
        try:
            self._compare_all(weights, found, pool, running)
        except BaseException:
            _end(running)
            raise

    def _compare_all(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        found: list[BlockDelta],
        pool: ThreadPoolExecutor,
        running: deque[Future[None]],
    ) -> None:
        seen: set[str] = set()
        for name, tensor in weights:
            spec = self._specs[name]
            source.check(spec, tensor)
            source.finish_writes(tensor)
            if name in seen:
                _drain(running, 0)
                self._check_same(spec, tensor)
                continue
            seen.add(name)
            for start, count in split_blocks(spec):
                running.append(pool.submit(self._compare, spec, tensor, start, count, found))
                _drain(running, 4 * self._threads)  # weights made on the way are let go of on the way
        _drain(running, 0)
        missing = [name for name in self._specs if name not in seen]
        if missing:
            raise BaseMismatch(
                f"{len(missing)} of the base's {len(self._specs)} tensors are missing from what was published "
                f"({', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}); publish the whole model every time"
            )

    def _compare(self, spec: TensorSpec, tensor: torch.Tensor, start: int, count: int, found: list[BlockDelta]) -> None:
        """Move one block on, wholly or not at all, and record what changed."""
        held = self._bits[spec.name][start : start + count]
        parts: list[tuple[int, native.Changes]] = []  # in the order found, each with where in the block it begins
        try:
            for at, current in _pieces(tensor, spec, start, count, self._scratch):
                parts.append((at, native.diff(held[at : at + current.size], current, advance=True)))
            if len(parts) == 1:
                changes = parts[0][1]
            else:
                positions = np.concatenate([part.positions + np.uint32(at) for at, part in parts])
                old, new = (np.concatenate([part[side] for _, part in parts]) for side in (1, 2))
                changes = native.Changes(positions, old, new)
            changed = changes.positions.size
            if changed:
                lanes = native.hash_changes(changes.positions, start, changes.old, changes.new, state_hash.seed(spec))
                dense = held.copy() if dense_may_win(changed, count, spec.width) else None
                found.append(BlockDelta(spec, start, count, changes, lanes, dense))
        except BaseException:
            for at, part in parts:
                part.undo(held[at:])
            raise

    def _check_same(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        for start, count in split_blocks(spec):
            for at, current in _pieces(tensor, spec, start, count, self._scratch):
                if not np.array_equal(self._bits[spec.name][start + at : start + at + current.size], current):
                    raise BaseMismatch(
                        f"{spec.name}: comes twice (tied names are one tensor to the base) and its contents differ; "
                        "tie the weights, or open a new run on a base that has both"
                    )

    def undo(self, delta: Delta) -> None:
        """Take back the newest version that was not taken back yet. Doing it twice does no harm."""
        with self._moving:
            self._take_back(delta)
            for frozen in tuple(self._frozen):
                frozen.moved_back(delta)
                if frozen.lost:  # a traceback may have it for long: it is to keep none of the versions to come
                    self._frozen.discard(frozen)

    @contextmanager
    def freeze(self, files: Mapping[str, bytes], most_bytes: int | None = None) -> Iterator[FrozenState]:
        """The state as it is now, to be read while the snapshot moves on. May be called from any thread.

        Args:
            files: configuration, tokenizer and the like that belong to the model, by file name.
            most_bytes: of changes since, beyond which it is given up; None: half of the model, or FROZEN_BYTES if more.
        """
        if most_bytes is None:
            most_bytes = max(FROZEN_BYTES, sum(spec.nbytes for spec in self._specs.values()) // 2)
        frozen = self._freeze(files, most_bytes)
        try:
            yield frozen
        finally:
            with self._moving:
                self._frozen.discard(frozen)

    def at_present(self) -> FrozenState:
        """The same without files, for as long as somebody has it: a version's, while it is encoded."""
        return self._freeze({}, sys.maxsize)

    def _freeze(self, files: Mapping[str, bytes], most_bytes: int) -> FrozenState:
        with self._moving:
            frozen = FrozenState(self._bits, self._lanes, self._moving, files, most_bytes)
            self._frozen.add(frozen)
            return frozen

    def _take_back(self, delta: Delta) -> None:
        self._restore(delta.blocks)
        self._lanes.update(delta.before)

    def _restore(self, blocks: Iterable[BlockDelta]) -> None:
        for block in blocks:
            block.changes.undo(self._bits[block.spec.name][block.start : block.start + block.count])


def _pieces(
    tensor: torch.Tensor, spec: TensorSpec, start: int, count: int, scratch: source.Scratch
) -> Iterator[tuple[int, source.Bits]]:
    """The block's bits in order, as (offset in the block, bits).

    The tensor's own memory where it can be read in place, else cast copies in `scratch`, good until the next piece.
    """
    in_place = source.view_bits(tensor, spec)
    if in_place is not None:
        yield 0, in_place[start : start + count]
        return
    for at in range(0, count, CHUNK):
        size = min(CHUNK, count - at)
        yield at, source.read_bits(tensor, spec, start + at, size, scratch)


def _drain(running: deque[Future[None]], limit: int) -> None:
    """Wait until at most `limit` comparisons are running; raises what one of them raised."""
    while len(running) > limit:
        running[0].result()
        running.popleft()


def _end(running: Collection[Future[None]]) -> None:
    """Wait until no comparison is running, whatever interrupts: what one still moves on, nobody would take back."""
    while True:
        try:
            for future in running:
                future.cancel()
            wait(running)
            return
        except KeyboardInterrupt:  # one more; the first is on its way to the caller
            continue
