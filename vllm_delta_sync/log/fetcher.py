"""Fetching what one reader needs of a version or a fold, once for all readers on its node.

Does not decide what to follow, and decodes no block.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

from vllm_delta_sync.errors import CacheError, DigestMismatch
from vllm_delta_sync.log import payload as payloads
from vllm_delta_sync.log import ranges
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.download import Download
from vllm_delta_sync.log.held import Fill, Good, Held, Stash, in_temporary
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.log.neighbours import Neighbours
from vllm_delta_sync.log.ranges import ShardRead, Span
from vllm_delta_sync.store import Store
from vllm_delta_sync.wire import codecs, consistency
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import Found
from vllm_delta_sync.wire.payload import Parts, Payload, parts_of
from vllm_delta_sync.wire.table import Block, VersionTable


class Fetcher:
    """Reads payloads of one run; for one thread. Every method raises what the store raises, and DigestMismatch.

    Where the cache fails, fetching goes on without it: `take_cache_failure` tells, and it is tried again later.

    Args:
        store: rooted at the run.
        cache: shared with other readers on this node, also of other engines; None to fetch for this one only.
        needs: which elements this reader holds. The other readers at the cache know them from now on.
        clock: seconds, monotonic.
    """

    def __init__(
        self, store: Store, cache: NodeCache | None, needs: Needs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._needs = store, needs
        self._download, self._stash = Download(store), Stash(cache, clock)
        self._neighbours: Neighbours | None = None
        self._first: tuple[str, Held] | None = None  # shard 0, by digest, when the table was taken from it
        self._before = 0
        self._together = self._needs_of_node()
        self.cached_bytes = 0  # of the payload, that came from the cache
        self.needed_bytes = 0  # of the payload: table and stored blocks that the readers of this node hold

    @property
    def fetched_bytes(self) -> int:
        """Of the payload whose table was asked for last, what this reader got from the store."""
        return self._download.bytes - self._before

    def take_cache_failure(self) -> CacheError | None:
        """Why the cache was given up since this was last asked; None when it was not."""
        return self._stash.take_failure()

    def table(self, payload: Payload) -> VersionTable:
        """The table of a version or a fold, verified, and consistent with what states it; counts begin anew."""
        parts = parts_of(payload)
        self._before = self._download.bytes
        self.cached_bytes, self.needed_bytes, self._first = 0, parts.table.size, None
        self._together = self._needs_of_node()
        what = f"{self._store.uri}/{parts.shards[0].key}, table"
        table = VersionTable.from_bytes(self._table_bytes(parts, what), what)
        consistency.check(parts, table, what)
        return table

    def blocks(self, payload: Payload, table: VersionTable) -> Iterator[tuple[Block, bytes]]:
        """The blocks that this reader needs, with their stored bytes, still encoded; at most one shard is held.

        Args:
            table: what `table` gave for this payload.
        """
        parts, together = parts_of(payload), self._together
        wanted = [block for block in table.blocks if together.wants(block)]
        self.needed_bytes = parts.table.size + sum(block.stored for block in wanted)
        for read in self._reads(parts, wanted):
            mine = [block for block in read.blocks if self._needs.wants(block)]
            if mine:
                yield from self._taken(read, mine)

    def object(self, ref: Found) -> Buffer:
        """All of an object, verified and mapped: as it is in the cache or at the store, else from a temporary file.

        Raises CacheError when there is no room for that either.
        """
        fill = self._all_of(ref)

        def apart() -> memoryview:
            data = self._download.mapped(ref)
            return in_temporary(ref.size, fill) if data is None else data

        held = self._stash.get(ref.sha256, ref.size, fill, apart)
        data = held.view(_with_sha256(ref.sha256))
        self.cached_bytes += 0 if held.fetched else ref.size
        return data

    def states(self, ref: Found, state_root: str) -> VersionTable:
        """An anchor's table of all tensors' states, consistent with the state root of its version."""
        return payloads.read_states(self._store.uri, ref, state_root, lambda: self.object(ref))

    def close(self) -> None:
        """Let the readers of this node no longer fetch for this one."""
        if self._neighbours is not None:
            self._neighbours.close()
            self._neighbours = None

    # --- parts -------------------------------------------------------------------------------------------------------
    def _reads(self, parts: Parts, wanted: Sequence[Block]) -> list[ShardRead]:
        if self._first is None:
            return ranges.plan(parts.shards, parts.table.size, wanted)
        return ranges.wholes(parts.shards, wanted)

    def _table_bytes(self, parts: Parts, what: str) -> bytes:
        ref, at = parts.shards[0], parts.table
        if self._together.ranges is None:
            # Everything is needed, so the shard that the table lies in is too.
            held, start = self._stash.get(ref.sha256, ref.size, self._all_of(ref)), at.start
            self._first = ref.sha256, held
        else:
            span = Span(at.start, at.start + at.size)
            held, start = self._stash.get(at.sha256, at.size, self._range_of(ref, span, at.sha256)), 0
        good = _with_sha256(at.sha256)
        data = held.take(start, at.size, good)
        if not good(data):
            raise DigestMismatch(f"{what}: its SHA-256 is not {at.sha256} as stated; the version was written wrongly")
        self.cached_bytes += 0 if held.fetched else at.size
        return data

    def _taken(self, read: ShardRead, mine: Sequence[Block]) -> Iterator[tuple[Block, bytes]]:
        if self._first is not None and self._first[0] == read.name:
            held, self._first = self._first[1], None
        else:
            held = self._stash.get(read.name, read.size, self._spans_of(read))
        places = read.places()
        for block in mine:
            data = held.take(places[block.offset], block.stored, _of_block(block))
            self.cached_bytes += 0 if held.fetched else block.stored
            yield block, data

    def _all_of(self, ref: Found) -> Fill:
        return lambda write, most: self._download.object(ref, write, most)

    def _range_of(self, ref: Found, span: Span, sha256: str) -> Fill:
        return lambda write, _: self._download.range(ref, span, sha256, write)

    def _spans_of(self, read: ShardRead) -> Fill:
        if read.whole:
            return self._all_of(read.ref)
        return lambda write, most: self._download.blocks(read, write, most)

    def _needs_of_node(self) -> Needs:
        cache = self._stash.cache
        if cache is not None:
            try:
                if self._neighbours is None:
                    self._neighbours = Neighbours(cache, self._store.uri, self._needs)
                return self._neighbours.together()
            except CacheError as error:
                self._stash.give_up(error)
        return self._needs


def _with_sha256(expected: str) -> Good:
    return lambda data: hashlib.sha256(data).hexdigest() == expected


def _of_block(block: Block) -> Good:
    def good(data: Buffer) -> bool:
        try:
            codecs.check_digest(block, data)
        except DigestMismatch:
            return False
        return True

    return good
