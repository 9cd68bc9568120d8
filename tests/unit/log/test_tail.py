"""Who watches a log hears of each version once, for few requests."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_log

from tests.unit.log.replicas import LENGTH, pinned
from vllm_delta_sync.errors import DigestMismatch, MalformedObject
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.tail import Tail, TipWatch
from vllm_delta_sync.store import Content, ObjectInfo, Store
from vllm_delta_sync.wire import frames


class _Counting:
    """A store that notes which keys are asked for."""

    conditional = True
    metered = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        self.asked: list[tuple[str, str]] = []
        self.heads = 0

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        self.asked.append(("get", key.rsplit("/", 1)[-1].partition(".")[2] or key))
        return self._store.get(key, start, end, content=content)

    def head(self, key: str) -> ObjectInfo:
        self.asked.append(("head", key))
        return self._store.head(key)


def test_a_follower_that_is_in_step_asks_once_and_then_for_one_manifest_a_version(long: tiny_log.TinyLog) -> None:
    store = _Counting(long.log.store)
    tail = Tail(DeltaLog(store, long.log.run))  # type: ignore[arg-type]
    assert tail.look() == []
    assert tail.version == LENGTH
    store.asked.clear()
    assert tail.look() == []
    assert store.asked == [("head", "LATEST")]
    store.asked.clear()
    long.publish(tiny_log.changed_model(long.models[-1], 80))
    (hop,) = tail.look()
    assert (hop.kind, hop.to, tail.version) == ("delta", 7, 7)
    assert tail.fetched == hop.bytes
    # The table is in the shard; the catalog is known.
    assert store.asked == [
        ("head", "LATEST"),
        ("get", "LATEST"),
        ("get", "manifest.json"),
        ("get", "safetensors"),
    ]


def test_a_tail_from_the_base_takes_the_way_of_a_follower_and_verifies_it(long: tiny_log.TinyLog) -> None:
    tail = Tail(long.log, from_base=True)
    assert [(hop.kind, hop.to) for hop in tail.look()] == [("fold", 4), ("delta", 5), ("delta", 6)]
    long.publish(tiny_log.changed_model(long.models[-1], 81))
    path = long.object(long.log.tip().shards[0].key)
    whole = path.read_bytes()
    tiny_log.damage(path)
    with pytest.raises(DigestMismatch):
        tail.look()
    assert tail.version == LENGTH
    path.write_bytes(whole)
    assert [hop.to for hop in tail.look()] == [7]


def test_a_tail_reads_the_streams_of_what_it_fetches(long: tiny_log.TinyLog) -> None:
    update = tiny_log.updates_between(long.models[0], long.models[1])[0]
    start, count, block = update.blocks[0]
    endless = dataclasses.replace(block, index=frames.compress(b"\xff" * block.raw[0]))  # no gap in it ever ends
    long.writer.commit(
        [dataclasses.replace(update, blocks=[(start, count, endless)])], state_root=long.log.tip().state_root
    )
    with pytest.raises(MalformedObject, match=r"embed\.weight"):
        Tail(long.log, from_base=True).look()


def test_a_watch_tells_of_each_change_of_latest_once(long: tiny_log.TinyLog) -> None:
    watch = TipWatch(long.log)
    first = watch.look()
    assert first is not None
    assert watch.look() is None
    pinned(long, 5)
    second = watch.look()
    assert second is not None
    assert (second.pin, second.version) == (5, first.version)
    assert watch.look() is None
