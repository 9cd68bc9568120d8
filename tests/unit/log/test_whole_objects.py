"""A whole object, such as a file of an anchor of many gigabytes, is verified and never held in memory."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import pytest
import tiny_folds
import tiny_log
from counting_store import CountingStore

from vllm_delta_sync.errors import CacheError, DigestMismatch, MalformedObject, NotFound
from vllm_delta_sync.log import held
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.wire.manifest import Found

NEEDS = Needs({"embed.weight": ((0, 2048),)})


@pytest.fixture
def ref(tiny: tiny_log.TinyLog) -> Found:
    return tiny.log.tip().shards[0]


@pytest.fixture
def whole(tiny: tiny_log.TinyLog, ref: Found) -> bytes:
    return tiny.object(ref.key).read_bytes()


def full(handle: int, data: bytes, position: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_of_a_store_of_files_a_whole_object_is_its_very_file(tiny: tiny_log.TinyLog, ref: Found, whole: bytes) -> None:
    fetcher = Fetcher(tiny.log.store, None, NEEDS)
    found = memoryview(fetcher.object(ref))
    assert isinstance(found.obj, mmap.mmap) and found.readonly and found == whole
    assert (fetcher.fetched_bytes, fetcher.cached_bytes) == (ref.size, 0)
    tiny.object(ref.key).unlink()
    assert found == whole
    with pytest.raises(NotFound, match=ref.key):
        fetcher.object(ref)
    for damaged in (whole[:-1], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1])):
        tiny.object(ref.key).write_bytes(damaged)
        with pytest.raises(DigestMismatch, match=ref.key):
            fetcher.object(ref)


def test_a_cache_that_was_asked_for_is_used_for_a_store_of_files_too(
    tiny: tiny_log.TinyLog, ref: Found, whole: bytes, tmp_path: Path
) -> None:
    cache = NodeCache(tmp_path / "cache", 1 << 20)
    assert Fetcher(tiny.log.store, cache, NEEDS).object(ref) == whole
    tiny.object(ref.key).unlink()
    assert Fetcher(tiny.log.store, cache, NEEDS).object(ref) == whole


def test_the_states_of_an_anchor_come_once_for_all_readers_of_a_node_and_are_proven(
    tiny: tiny_log.TinyLog, tmp_path: Path
) -> None:
    anchor = tiny_folds.add_anchor(tiny, 2)
    store, cache = CountingStore(tiny.log.store), NodeCache(tmp_path / "cache", 1 << 20)
    for _ in range(2):
        table = Fetcher(store, cache, NEEDS).states(anchor.table, anchor.state_root)
        assert [spec.name for spec in table.tensors] == [spec.name for spec in tiny.log.base_table().tensors]
    assert [key for key, _, _ in store.gets] == [anchor.table.key]
    with pytest.raises(MalformedObject, match=anchor.table.key):
        Fetcher(store, cache, NEEDS).states(anchor.table, tiny.log.tip().state_root)


def test_without_files_or_a_cache_a_large_object_is_a_temporary_file(
    tiny: tiny_log.TinyLog, ref: Found, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "PIECE_BYTES", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    store = CountingStore(tiny.log.store)
    fetcher = Fetcher(store, None, NEEDS)
    found = memoryview(fetcher.object(ref))
    assert isinstance(found.obj, mmap.mmap) and found.readonly and found == whole
    assert max(end - start for _, start, end in store.gets if end) == 100
    assert list((tmp_path / "temporary").iterdir()) == []
    with monkeypatch.context() as disk, pytest.raises(CacheError, match=r"No space left on device.*TMPDIR"):
        disk.setattr(os, "pwrite", full)
        fetcher.object(ref)
    store.damage[ref.key] = 250
    with pytest.raises(DigestMismatch):
        fetcher.object(ref)
