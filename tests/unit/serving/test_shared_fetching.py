"""Ranks of one node that share a cache follow as they do without, and fetch once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.unit.serving.fleet import Following, publish, weights
from vllm_delta_sync.log.cache import NodeCache


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", 1 << 20)


def test_two_ranks_take_every_step_from_one_download(tmp_path: Path, cache: NodeCache) -> None:
    states = publish(tmp_path / "bucket", weights(), 3)
    fleet = Following(tmp_path / "bucket", states[0], cache=cache)
    fleet.join()
    for hop in fleet.deltas():
        first, second = (rank.stage(hop) for rank in fleet.ranks)
        assert first.fetched_bytes == hop.bytes and first.cached_bytes == 0
        assert second.fetched_bytes == 0 < second.cached_bytes <= hop.bytes
        assert (first.cache_failure, second.cache_failure) == (None, None)
        fleet.commit(hop.to)
    assert fleet.serves(states[-1])


def test_spoilt_entries_are_fetched_again_and_nothing_else_shows(tmp_path: Path, cache: NodeCache) -> None:
    states = publish(tmp_path / "bucket", weights(), 2)
    fleet = Following(tmp_path / "bucket", states[0], cache=cache)
    fleet.join()
    for hop in fleet.deltas():
        fleet.ranks[0].stage(hop)
        for path in cache.directory.iterdir():
            if path.name[0] != ".":
                path.write_bytes(bytes(path.stat().st_size))
        assert fleet.ranks[1].stage(hop).fetched_bytes == hop.bytes
        fleet.commit(hop.to)
    assert fleet.serves(states[-1])


def test_a_cache_that_cannot_be_used_is_named_once_and_following_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    states = publish(tmp_path / "bucket", weights(), 2)
    fleet = Following(tmp_path / "bucket", states[0], cache=NodeCache(tmp_path / "file" / "cache", 1 << 20))
    fleet.join()
    told = []
    for hop in fleet.deltas():
        for rank in fleet.ranks:
            staged = rank.stage(hop)
            assert staged.fetched_bytes > 0
            told.append(staged.cache_failure)
        fleet.commit(hop.to)
    assert fleet.serves(states[-1])
    assert [failure is not None and "Not a directory" in failure for failure in told] == [True, True, False, False]


def test_a_cache_that_turns_read_only_keeps_no_rank_from_joining_again(
    tmp_path: Path, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = publish(tmp_path / "bucket", weights(), 2)
    fleet = Following(tmp_path / "bucket", states[0], cache=cache)
    fleet.join()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    fleet.join()
    fleet.follow()
    assert fleet.serves(states[-1])
