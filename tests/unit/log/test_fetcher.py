"""A reader fetches what it needs, verified, and once for all readers on its node; the cache can only help."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_log
from counting_store import CountingStore

from vllm_delta_sync.errors import DigestMismatch, NotFound
from vllm_delta_sync.log import download, held
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.wire.manifest import Manifest

EMBED = Needs({"embed.weight": ((0, 2048),)})
PROJ = Needs({"layers.0.proj": ((0, 10),), "layers.0.norm": ((0, 32),)})


@pytest.fixture
def store(tiny: tiny_log.TinyLog) -> CountingStore:
    return CountingStore(tiny.log.store)


@pytest.fixture
def tip(tiny: tiny_log.TinyLog) -> Manifest:
    return tiny.log.tip()


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", 1 << 20)


def fetched(fetcher: Fetcher, payload: Manifest) -> dict[tuple[str, int], bytes]:
    """Stored bytes by tensor and start."""
    table = fetcher.table(payload)
    return {(block.spec.name, block.start): data for block, data in fetcher.blocks(payload, table)}


def expected(tiny: tiny_log.TinyLog, payload: Manifest, *names: str) -> dict[tuple[str, int], bytes]:
    rows = [row for row in tiny.log.table(payload).blocks if not names or row.spec.name in names]
    return {(row.spec.name, row.start): bytes(data) for row, data in tiny.log.blocks(payload, rows)}


def entries(cache: NodeCache) -> list[Path]:
    return sorted(path for path in cache.directory.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("cached", [False, True])
def test_who_needs_everything_gets_each_shard_in_one_request(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, cached: bool
) -> None:
    fetcher = Fetcher(store, cache if cached else None, Needs.everything())
    assert fetched(fetcher, tip) == expected(tiny, tip)
    assert store.gets == [(tip.shards[0].key, 0, tip.shards[0].size)]
    assert fetcher.fetched_bytes == store.bytes == tip.totals.bytes
    assert (fetcher.cached_bytes, fetcher.take_cache_failure()) == (0, None)


@pytest.mark.parametrize("cached", [False, True])
def test_who_needs_a_part_gets_the_table_and_that_part(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, cached: bool
) -> None:
    fetcher = Fetcher(store, cache if cached else None, PROJ)
    found = fetched(fetcher, tip)
    assert found == expected(tiny, tip, "layers.0.proj", "layers.0.norm")
    assert fetcher.needed_bytes == tip.table.size + sum(map(len, found.values()))
    assert fetcher.fetched_bytes == store.bytes == fetcher.needed_bytes < tip.totals.bytes


def test_the_first_reader_of_a_node_fetches_for_all(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache
) -> None:
    one, other = Fetcher(store, cache, EMBED), Fetcher(store, NodeCache(cache.directory, 1 << 20), PROJ)
    assert fetched(one, tip) == expected(tiny, tip, "embed.weight")
    came = store.bytes
    assert fetched(other, tip) == expected(tiny, tip, "layers.0.proj", "layers.0.norm")
    assert (store.bytes, one.fetched_bytes, other.fetched_bytes) == (came, came, 0)
    assert one.needed_bytes == other.needed_bytes
    assert one.cached_bytes == 0
    assert other.cached_bytes == tip.table.size + sum(map(len, expected(tiny, tip, *PROJ.ranges or ()).values()))


def test_halves_that_make_up_everything_are_fetched_as_whole_shards(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache
) -> None:
    elements = sum(spec.numel for spec in tiny_log.SPECS)
    rest = {spec.name: ((0, spec.numel),) for spec in tiny_log.SPECS if spec.name != "embed.weight"}
    one = Fetcher(store, cache, Needs({"embed.weight": ((0, 2048),)}, elements))
    other = Fetcher(store, cache, Needs(rest, elements))
    assert len(fetched(one, tip)) + len(fetched(other, tip)) == len(expected(tiny, tip))
    assert store.gets == [(tip.shards[0].key, 0, tip.shards[0].size)]


@pytest.mark.parametrize("leave", [Fetcher.close, lambda fetcher: None], ids=["closed", "let go"])
def test_for_a_reader_that_left_nothing_is_fetched(
    tiny: tiny_log.TinyLog,
    store: CountingStore,
    tip: Manifest,
    cache: NodeCache,
    leave: Callable[[Fetcher], None],
) -> None:
    one, other = Fetcher(store, cache, EMBED), Fetcher(store, cache, PROJ)
    leave(other)
    del other
    gc.collect()
    fetched(one, tip)
    assert one.fetched_bytes == tip.table.size + sum(map(len, expected(tiny, tip, "embed.weight").values()))


def test_readers_of_another_run_do_not_matter(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, tmp_path: Path
) -> None:
    other_run = tiny_log.build(tmp_path / "other", 1).log.store
    foreign, one = Fetcher(other_run, cache, Needs.everything()), Fetcher(store, cache, EMBED)
    fetched(one, tip)
    assert one.fetched_bytes < tip.totals.bytes
    foreign.close()


@pytest.mark.parametrize("needs", [EMBED, Needs.everything()], ids=["part", "everything"])
def test_whatever_was_done_to_the_files_of_the_cache_the_bytes_are_right(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, needs: Needs
) -> None:
    right = fetched(Fetcher(store, cache, needs), tip)
    came, sizes = store.bytes, [path.stat().st_size for path in entries(cache)]
    for path in entries(cache):
        path.write_bytes(bytes(path.stat().st_size))
    reader = Fetcher(store, cache, needs)
    assert fetched(reader, tip) == right
    assert store.bytes == 2 * came  # fetched again
    assert [path.stat().st_size for path in entries(cache)] == sizes
    assert fetched(Fetcher(store, cache, needs), tip) == right
    assert store.bytes == 2 * came  # and in order again
    assert reader.take_cache_failure() is None


def test_needs_that_nobody_can_read_are_passed_over(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache
) -> None:
    one, other = Fetcher(store, cache, EMBED), Fetcher(store, cache, PROJ)
    for path in cache.directory.glob(".needs/*/*"):
        path.write_bytes(b"{")
    assert fetched(one, tip) == expected(tiny, tip, "embed.weight")
    other.close()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("needs", [PROJ, Needs.everything()], ids=["part", "everything"])
def test_a_byte_that_comes_wrong_is_noticed_and_not_kept(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, needs: Needs, cached: bool
) -> None:
    row = next(row for row in tiny.log.table(tip).blocks if row.spec.name == "layers.0.proj")
    shard = tip.shards[0]
    store.damage[shard.key] = shard.data_start + row.offset + 3
    with pytest.raises(DigestMismatch):
        fetched(Fetcher(store, cache if cached else None, needs), tip)
    store.damage.clear()
    assert fetched(Fetcher(store, cache if cached else None, needs), tip)[row.spec.name, row.start]


def test_a_table_that_comes_wrong_is_noticed(store: CountingStore, tip: Manifest, cache: NodeCache) -> None:
    store.damage[tip.shards[0].key] = tip.table.start
    for where in (cache, None):
        with pytest.raises(DigestMismatch):
            Fetcher(store, where, EMBED).table(tip)
    assert entries(cache) == []


@pytest.mark.parametrize("needs", [PROJ, Needs.everything()], ids=["part", "everything"])
def test_a_shard_that_is_gone_or_short_is_an_error_of_the_store(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, needs: Needs
) -> None:
    path = tiny.object(tip.shards[0].key)
    whole = path.read_bytes()
    path.write_bytes(whole[: tip.shards[0].data_start + 1])
    with pytest.raises(DigestMismatch):
        fetched(Fetcher(store, cache, needs), tip)
    path.unlink()
    with pytest.raises((NotFound, DigestMismatch)):
        fetched(Fetcher(store, None, needs), tip)


@pytest.mark.parametrize("hint", ["right", "nowhere", "elsewhere"])
@pytest.mark.parametrize("needs", [PROJ, Needs.everything()], ids=["part", "everything"])
def test_contents_are_fetched_by_id_and_a_wrong_id_hides_nothing(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, needs: Needs, hint: str
) -> None:
    right = fetched(Fetcher(store, None, needs), tip)
    shard = tip.shards[0].model_copy(update={"content": "ab" * 32})
    payload = tip.model_copy(update={"shards": (shard,)})
    data = tiny.object(shard.key).read_bytes()
    if hint != "nowhere":
        store.contents["ab" * 32] = data if hint == "right" else bytes(len(data))
    if hint == "right":
        tiny.object(shard.key).unlink()
    assert fetched(Fetcher(store, None, needs), payload) == right


def full(handle: int, start: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_once_and_fetching_goes_on(
    tiny: tiny_log.TinyLog,
    store: CountingStore,
    tip: Manifest,
    cache: NodeCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    fetcher = Fetcher(store, cache, EMBED, lambda: now[0])
    with monkeypatch.context() as disk:
        disk.setattr(os, "posix_fallocate", full)
        assert fetched(fetcher, tip) == expected(tiny, tip, "embed.weight")
    failure = fetcher.take_cache_failure()
    assert failure is not None and failure.cause == "cache" and "No space left on device" in str(failure)
    fetched(fetcher, tip)
    assert fetcher.take_cache_failure() is None and entries(cache) == []
    now[0] += held.RETRY_S
    fetched(fetcher, tip)
    assert fetcher.take_cache_failure() is None and len(entries(cache)) == 2


def test_a_cache_that_cannot_be_made_or_is_too_small_does_not_matter(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for cache in (NodeCache(tmp_path / "file" / "cache", 1 << 20), NodeCache(tmp_path / "small", 10)):
        fetcher = Fetcher(store, cache, EMBED)
        assert fetched(fetcher, tip) == expected(tiny, tip, "embed.weight")
        failure = fetcher.take_cache_failure()
        assert failure is not None and str(cache.directory) in str(failure)


def test_a_cache_may_be_deleted_at_any_time(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache
) -> None:
    one, other = Fetcher(store, cache, EMBED), Fetcher(store, cache, PROJ)
    fetched(one, tip)
    shutil.rmtree(cache.directory)
    assert fetched(one, tip) == expected(tiny, tip, "embed.weight")
    assert fetched(other, tip) == expected(tiny, tip, "layers.0.proj", "layers.0.norm")
    came = store.bytes
    fetched(one, tip)
    assert store.bytes == came, "both are known again, and what they need together is there"
    assert (one.take_cache_failure(), other.take_cache_failure()) == (None, None)


def test_large_reads_come_to_the_cache_in_pieces_that_cut_no_block(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "PIECE_BYTES", 100)
    monkeypatch.setattr(download, "AHEAD_BYTES", 250)
    assert fetched(Fetcher(store, cache, Needs.everything()), tip) == expected(tiny, tip)
    assert len(store.gets) == -(-tip.shards[0].size // 100)
    assert max(end - start for _, start, end in store.gets if end) == 100
    names = [spec.name for spec in tiny_log.SPECS if spec.name != "layers.0.proj"]
    most = Needs({name: ((0, 1 << 20),) for name in names})
    assert fetched(Fetcher(store, NodeCache(cache.directory / "other", 1 << 20), most), tip) == expected(
        tiny, tip, *names
    )


def test_a_whole_object_is_verified_and_shared(
    tiny: tiny_log.TinyLog, store: CountingStore, tip: Manifest, cache: NodeCache
) -> None:
    ref = tip.shards[0]
    for reader in (Fetcher(store, cache, EMBED), Fetcher(store, cache, EMBED)):
        assert hashlib.sha256(reader.object(ref)).hexdigest() == ref.sha256
        assert len(store.gets) == 1
    entries(cache)[0].write_bytes(bytes(ref.size))
    assert hashlib.sha256(Fetcher(store, cache, EMBED).object(ref)).hexdigest() == ref.sha256
    assert hashlib.sha256(Fetcher(store, None, EMBED).object(ref)).hexdigest() == ref.sha256
    assert len(store.gets) == 3
