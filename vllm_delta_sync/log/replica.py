"""A model's tensors in memory that follow a log hop by hop, each hop proven by state hash, whole or not at all.

Does not touch live weights of a server, and does not poll: its caller says when LATEST has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.errors import LogError, MalformedObject, NotFound, StateError, StateHashMismatch, VersionGap
from vllm_delta_sync.log import layers
from vllm_delta_sync.log.base import Base, Tensor, anchor_directory, base_directory, proven
from vllm_delta_sync.log.compose import Held, hold
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.layers import End, Layer
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef
from vllm_delta_sync.wire.table import Block, VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog

Keep = Callable[[Layer], object]
_Undo = tuple[str, int, np.ndarray, np.ndarray]  # tensor, block's start, positions, old bits


class Replica:
    """The model at one version. Not for use from several threads at once.

    `held` is the manifest of the version held, `root` its state root, `lanes` the state hash u32[4] of each tensor,
    `tensors` their bits by name; those that never changed are views of the checkpoint it began with, not to be written
    to.

    Args:
        base: the checkpoint of version 0, as for `materialize`.

    Raises what `log.base` raises when there is none or it is another one.
    """

    def __init__(self, log: DeltaLog, base: Base = None, *, progress: Progress = silent) -> None:
        pointer = log.latest()
        first = log.base(pointer)
        with base_directory(log, first, base) as found:
            self._begin(log, pointer.base, first.version, log.table(first), found, progress)

    @classmethod
    def at_base(
        cls, log: DeltaLog, pointer: LatestPointer, found: Path | Mapping[str, Tensor], progress: Progress = silent
    ) -> Replica:
        """At version 0, whose checkpoint is at hand as a directory or tensors."""
        replica = cls.__new__(cls)
        replica._begin(log, pointer.base, 0, log.table(log.base(pointer)), found, progress)
        return replica

    @classmethod
    def at_anchor(cls, log: DeltaLog, hop: Hop, found: Path, progress: Progress = silent) -> Replica:
        """At the version of an anchor, whose checkpoint is in a directory."""
        replica = cls.__new__(cls)
        replica._begin(log, hop.target, hop.to, anchor_table(log, hop), found, progress)
        return replica

    def _begin(
        self,
        log: DeltaLog,
        held: ObjectRef,
        version: int,
        table: VersionTable,
        found: Path | Mapping[str, Tensor],
        progress: Progress,
    ) -> None:
        self.log = log
        self.route = Route(log)
        self._fetcher = Fetcher(log.store, None, Needs.everything())
        self._specs = {spec.name: spec for spec in table.tensors}
        self._move_to(held, version, table, proven(table, found, f"version {version} of the log", progress))

    def _move_to(self, held: ObjectRef, version: int, table: VersionTable, tensors: dict[str, Tensor]) -> None:
        self.held, self.version, self.tensors = held, version, tensors
        self.lanes = {spec: np.array(lanes) for spec, lanes in zip(table.tensors, table.hashes, strict=True)}
        self.root = state_hash.state_root(self.lanes)
        self._own: set[str] = set()  # tensors whose bits are copies of ours, not the checkpoint's

    def follow(self, pointer: LatestPointer) -> None:
        """Go to the goal of LATEST, hop by hop; around hops that are damaged or missing, where another way leads.

        Raises VersionGap when LATEST went back without a pin, and what `Route.next_hop` and `apply` raise; what was
        reached until then stays.
        """
        require_onward(self.log, pointer, self.version)
        self.go_to(pointer, pointer.goal)

    def go_to(self, pointer: LatestPointer, goal: int, progress: Progress = silent, keep: Keep | None = None) -> None:
        """Go to any version that `pointer` leads to, as `follow` does. `keep`: as for `apply`."""
        start = self.version
        while (hop := self.route.next_hop(pointer, self.held, self.version, goal)) is not None:
            progress("applying deltas", abs(self.version - start), abs(goal - start))
            try:
                self.apply(hop, keep)
            except (LogError, StateError, NotFound):
                if not self.route.avoid(hop):
                    raise
        progress("applying deltas", abs(goal - start), abs(goal - start))

    def apply(self, hop: Hop, keep: Keep | None = None) -> None:
        """Take one hop. On any error the replica is what it was.

        Args:
            keep: is given each delta that was taken, with the steps of its blocks where they have some: who holds the
                values before can tell them, and from then on it composes without those.

        Raises VersionGap when the hop does not begin at what is held, StateHashMismatch when its effect is not the one
        it states, and what fetching and decoding raise.
        """
        if hop.kind == "anchor":
            self._jump(hop)
            return
        self._require_start(hop)
        table = self._fetcher.table(hop)
        what = f"{self.log.store.uri}/{hop.shards[0].key}"
        table.require_known(self._specs, what)
        lanes, undo = {spec: self.lanes[spec] for spec in table.tensors}, list[_Undo]()
        held: dict[TensorSpec, list[Held]] = {}
        try:
            for block, payload in self._fetcher.blocks(hop, table):
                self._change(block, payload, lanes, undo)
                if keep is not None and hop.kind == "delta":
                    held.setdefault(block.spec, []).append(self._held(block, payload, undo[-1]))
            root = self._proven_root(hop, table, lanes, what)
            if keep is not None and hop.kind == "delta":
                ends = End(self.version, self.root, self.held), End(hop.to, root, hop.target)
                keep(layers.of_blocks(*ends, {spec: (lanes[spec], rows) for spec, rows in held.items()}))
        except BaseException:
            for name, start, positions, old in reversed(undo):
                self.tensors[name][1][start:][positions] = old
            raise
        self.lanes.update(lanes)
        self.held, self.version, self.root = hop.target, hop.to, root

    def _require_start(self, hop: Hop) -> None:
        if hop.source != self.version or (hop.parent is not None and hop.parent.sha256 != self.held.sha256):
            raise VersionGap(
                f"{self.log.store.uri}/{hop.shards[0].key}: the {hop.kind} to version {hop.to} does not begin at the "
                f"version {self.version} that is held ({self.held.key})"
            )
        if hop.before is not None and hop.before != self.root:
            raise StateHashMismatch(
                f"{self.log.store.uri}/{hop.shards[0].key}: the fold from version {hop.source} to {hop.to} begins at "
                f"state root {hop.before}, version {self.version} as it is held has {self.root}"
            )

    def _change(
        self, block: Block, payload: Buffer, lanes: dict[TensorSpec, state_hash.Lanes], undo: list[_Undo]
    ) -> None:
        spec = block.spec
        if spec.name not in self._own:
            self.tensors[spec.name] = spec, np.array(self.tensors[spec.name][1])
            self._own.add(spec.name)
        bits = self.tensors[spec.name][1][block.start : block.start + block.count]
        decoded = decode_block(block, payload, bits)
        old = bits[decoded.positions]
        new = decoded.new_bits(old)
        effect = native.hash_changes(decoded.positions, block.start, old, new, state_hash.seed(spec))
        undo.append((spec.name, block.start, decoded.positions, old))
        bits[decoded.positions] = new
        lanes[spec] = state_hash.add(lanes[spec], effect)

    def _held(self, block: Block, payload: Buffer, undo: _Undo) -> Held:
        """A block that was taken, with its steps."""
        name, start, positions, old = undo
        new = self.tensors[name][1][start:][positions]
        differ = old != new  # a dense block lists every element
        changes = native.Changes(positions[differ], old[differ], new[differ])
        return hold(block.spec, start, block.count, layers.own(block, payload), changes)

    def _proven_root(
        self, hop: Hop, table: VersionTable, lanes: Mapping[TensorSpec, state_hash.Lanes], what: str
    ) -> str:
        for spec, stated in zip(table.tensors, table.hashes, strict=True):
            if not np.array_equal(lanes[spec], stated):
                raise StateHashMismatch(
                    f"{what}: version {hop.to} leaves tensor {spec.name!r} at state hash "
                    f"{state_hash.to_hex(lanes[spec])}, but states {state_hash.to_hex(stated)}"
                )
        root = state_hash.state_root({**self.lanes, **lanes})
        if root != hop.after:
            raise StateHashMismatch(f"{what}: version {hop.to} comes to state root {root}, not {hop.after}")
        return root

    def _jump(self, hop: Hop) -> None:
        assert hop.checkpoint is not None, "a hop of kind anchor"
        table = anchor_table(self.log, hop)
        if set(table.tensors) != set(self.lanes):
            raise MalformedObject(
                f"{self.log.store.uri}/{hop.checkpoint.prefix}: the anchor of version {hop.to} lists other tensors "
                "than the model"
            )
        with anchor_directory(self.log, hop.checkpoint) as found:
            self._move_to(hop.target, hop.to, table, proven(table, found, f"version {hop.to} of the log"))


def anchor_table(log: DeltaLog, hop: Hop) -> VersionTable:
    """The states of all tensors at an anchor; those of version 0's own are in version 0's table."""
    return log.table(log.manifest(hop.target)) if hop.states is None else log.states(hop.states, hop.after)


def require_onward(log: DeltaLog, pointer: LatestPointer, held: int) -> None:
    """Raise VersionGap when LATEST names an older version than the one held, and no pin says that it is meant."""
    if pointer.pin is None and pointer.version < held:
        raise VersionGap(
            f"{log.store.uri}: LATEST went back from version {held} to {pointer.version}, and nothing is pinned; "
            f"version {held} stays; is it an old copy of the bucket?"
        )
