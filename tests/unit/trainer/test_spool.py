"""Small files of a model are kept as they were, outside of memory."""

from __future__ import annotations

import resource
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.trainer.spool import SpooledFiles


def test_files_are_read_back_as_they_were() -> None:
    files = {"config.json": b"{}", "empty.txt": b"", "tokenizer.json": bytes(range(256)) * 9}
    spooled = SpooledFiles(files)
    assert spooled == files and list(spooled) == list(files) and len(spooled) == 3
    with pytest.raises(KeyError):
        spooled["vocab.json"]


def test_they_take_no_memory() -> None:
    files = {"tokenizer.json": bytes(1 << 20)}
    tracemalloc.start()
    try:
        spooled = SpooledFiles(files)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 14 and spooled["tokenizer.json"] == bytes(1 << 20)


def test_without_a_place_for_temporary_files_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        SpooledFiles({"config.json": b"{}"})


def test_without_room_for_all_of_a_file_there_is_an_error_and_not_a_part_of_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigError, match="make room"):
            SpooledFiles({"tokenizer.json": bytes(3 << 19)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
