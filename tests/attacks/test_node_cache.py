"""Attacks 120–134: files in a node's cache that lie. Outcome of each: what a reader gets is right all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_log

from vllm_delta_sync.log import locks
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import MAX_BYTES, Needs

NEEDS = Needs({"embed.weight": ((0, 2048),), "layers.0.proj": ((5, 6),)})


def fetched(log: tiny_log.TinyLog, directory: Path | None, needs: Needs = NEEDS) -> list[bytes]:
    cache = None if directory is None else NodeCache(directory, 1 << 20, patience_s=0.1)
    tip = log.log.tip()
    fetcher = Fetcher(log.log.store, cache, needs)
    found = [data for _, data in fetcher.blocks(tip, fetcher.table(tip))]
    fetcher.close()
    return found


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent.parent / "outside")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _locked(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    assert locks.take(os.open(path, os.O_RDWR))  # and never given back


ENTRIES: dict[str, Callable[[Path], object]] = {
    "120 other bytes of the same size": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "121 one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "122 fewer bytes": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "123 more bytes": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "124 a link to another file": _link,
    "125 a pipe without another end": _pipe,
    "126 a directory": _directory,
    "127 locked for ever by someone else": _locked,
}


@pytest.mark.parametrize("needs", [NEEDS, Needs.everything()], ids=["part", "everything"])
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_was_tampered_with_misleads_nobody(
    tiny: tiny_log.TinyLog, tmp_path: Path, name: str, needs: Needs
) -> None:
    right = fetched(tiny, None, needs)
    (tmp_path / "outside").write_bytes(b"left alone")
    assert fetched(tiny, tmp_path / "cache", needs) == right
    entries = [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
    assert entries
    for path in entries:
        ENTRIES[name](path)
    for _ in range(2):
        assert fetched(tiny, tmp_path / "cache", needs) == right
    assert (tmp_path / "outside").read_bytes() == b"left alone"


STATED: dict[str, bytes] = {
    "128 no JSON": b"{",
    "129 a nest of a hundred thousand lists": b"[" * 100_000,
    "130 ranges that are none": b'{"elements":1,"ranges":{"embed.weight":[[-1,1e999]]}}',
    "131 more bytes than needs may have": bytes(MAX_BYTES + 1),
    "132 everything": Needs.everything().to_bytes(),
}


@pytest.mark.parametrize("name", STATED)
def test_needs_that_lie_make_a_reader_fetch_more_at_most(tiny: tiny_log.TinyLog, tmp_path: Path, name: str) -> None:
    right = fetched(tiny, tmp_path / "cache")
    (directory,) = (tmp_path / "cache" / ".needs").iterdir()
    (directory / "forged").write_bytes(STATED[name])
    handle = os.open(directory / "forged", os.O_RDWR)
    assert locks.take(handle), "as a living reader holds it"
    assert fetched(tiny, tmp_path / "cache") == right
    os.close(handle)


def test_133_links_and_directories_among_the_needs_are_left_alone(tiny: tiny_log.TinyLog, tmp_path: Path) -> None:
    right = fetched(tiny, tmp_path / "cache")
    (directory,) = (tmp_path / "cache" / ".needs").iterdir()
    (tmp_path / "outside").write_bytes(Needs.everything().to_bytes())
    (directory / "link").symlink_to(tmp_path / "outside")
    (directory / "directory").mkdir()
    tip = tiny.log.tip()
    fetcher = Fetcher(tiny.log.store, NodeCache(tmp_path / "cache", 1 << 20), NEEDS)
    assert [data for _, data in fetcher.blocks(tip, fetcher.table(tip))] == right
    assert fetcher.take_cache_failure() is None and fetcher.needed_bytes < tip.totals.bytes
    assert (tmp_path / "outside").exists()


def test_134_a_file_that_is_cut_short_while_it_is_read_ends_nothing(tiny: tiny_log.TinyLog, tmp_path: Path) -> None:
    right = fetched(tiny, tmp_path / "cache")
    tip = tiny.log.tip()
    fetcher = Fetcher(tiny.log.store, NodeCache(tmp_path / "cache", 1 << 20), NEEDS)
    blocks = fetcher.blocks(tip, fetcher.table(tip))
    found = [next(blocks)[1]]
    for path in (tmp_path / "cache").iterdir():
        if not path.name.startswith("."):
            os.truncate(path, 0)
    assert found + [data for _, data in blocks] == right
    assert fetcher.fetched_bytes > 0
