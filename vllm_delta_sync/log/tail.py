"""Watching a run without a model: LATEST when it changes, and a follower that fetches, verifies and drops.

Does not apply anything, so it proves every digest and stream, but no ctx tile and no state hash; and does not
wait: its caller does.
"""

from __future__ import annotations

from vllm_delta_sync.errors import LogError, NotFound
from vllm_delta_sync.log import anchors, names
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.replica import anchor_table, require_onward
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire.codecs import check_block
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef


class TipWatch:
    """Asks the store about LATEST by one `head`, and for its bytes only when they changed."""

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._tag: str | None = None

    def look(self) -> LatestPointer | None:
        """What LATEST says, or None when it is what it was at the last look that succeeded.

        Raises what `head` and `DeltaLog.latest` raise.
        """
        info = self._log.store.head(names.LATEST)
        if info.tag == self._tag:
            return None
        pointer = self._log.latest(info)
        self._tag = info.tag
        return pointer


class Tail:
    """A follower that holds a version by name only. Not for use from several threads at once.

    `version` is the one it holds, None before the first look; `fetched` counts bytes of shards and anchors, also
    of those that were refused.

    Args:
        from_base: begin at version 0 and take every hop since, rather than at what LATEST says at the first look.
    """

    def __init__(self, log: DeltaLog, *, from_base: bool = False) -> None:
        self.log = log
        self.version: int | None = None
        self.fetched = 0
        self._held: ObjectRef | None = None
        self._from_base = from_base
        self._watch = TipWatch(log)
        self._route = Route(log)
        self._fetcher = Fetcher(log.store, None, Needs.everything())
        self._pointer: LatestPointer | None = None

    def look(self) -> list[Hop]:
        """The hops to where LATEST says followers go to, each fetched and verified; none when nothing changed.

        Around hops that are damaged or missing it goes another way, if there is one. What was taken before an error
        stays taken. Raises what `Route.next_hop` and fetching raise.
        """
        pointer = self._watch.look() or self._pointer
        assert pointer is not None, "the first look that succeeds brings a pointer"
        self._pointer = pointer
        if self._held is None or self.version is None:
            self._held, self.version = self._begin(pointer)
        require_onward(self.log, pointer, self.version)
        taken = []
        while (hop := self._next(pointer)) is not None:
            try:
                self._take(hop)
            except (LogError, NotFound):
                if not self._route.avoid(hop):
                    raise
                continue
            self._held, self.version = hop.target, hop.to
            taken.append(hop)
        return taken

    def _begin(self, pointer: LatestPointer) -> tuple[ObjectRef, int]:
        at = 0 if self._from_base else pointer.goal
        return self._route.reference(pointer, at), at

    def _next(self, pointer: LatestPointer) -> Hop | None:
        assert self._held is not None and self.version is not None, "it has begun"
        return self._route.next_hop(pointer, self._held, self.version, pointer.goal)

    def _take(self, hop: Hop) -> None:
        if hop.checkpoint is not None:
            anchor_table(self.log, hop)
            for file in hop.checkpoint.files:
                for piece in anchors.pieces(self.log.store, file):
                    self.fetched += len(piece)
            return
        try:
            table = self._fetcher.table(hop)
            for block, payload in self._fetcher.blocks(hop, table):
                check_block(block, payload)
        finally:
            self.fetched += self._fetcher.fetched_bytes
