"""An export is a whole checkpoint under its name, durably, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tiny_log
from safetensors import safe_open

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log.export import export
from vllm_delta_sync.wire.checkpoint import open_checkpoint, write_checkpoint


def test_an_export_loads_as_a_checkpoint_and_carries_what_is_not_published(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path)
    frozen = tiny_log.TensorSpec("vision.frozen", "BF16", (3,)), np.arange(3, dtype=np.uint16)
    write_checkpoint(tiny.base, [*tiny.models[0].values(), frozen])
    files = export(tiny.log, 2, tmp_path / "out", tiny.base)
    assert {file.name for file in files} == {"model.safetensors", "config.json"}
    found = dict(open_checkpoint(tmp_path / "out"))
    np.testing.assert_array_equal(found.pop("vision.frozen")[1], frozen[1])
    assert tiny_log.same(found, tiny.models[2])
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert set(file.keys()) == {*tiny.models[2], "vision.frozen"}


def test_an_export_refuses_a_directory_that_holds_something(tiny: tiny_log.TinyLog) -> None:
    with pytest.raises(ConfigError, match="already exists"):
        export(tiny.log, 1, tiny.base, tiny.base)


def test_a_failed_export_leaves_nothing_behind(tiny: tiny_log.TinyLog, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def occupy(what: str, done: int, total: int) -> None:
        if what == "writing the checkpoint":
            out.mkdir()
            (out / "mine").touch()

    with pytest.raises(ConfigError, match="cannot write"):
        export(tiny.log, 1, out, tiny.base, progress=occupy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "bucket", "out"]
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_an_export_is_durable_with_its_name(
    tiny: tiny_log.TinyLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", record)
    export(tiny.log, 1, tmp_path / "out", tiny.base)
    assert synced[-1] == str(tmp_path)


def test_what_another_export_left_does_not_get_into_this_one(tiny: tiny_log.TinyLog, tmp_path: Path) -> None:
    left = tmp_path / ".out.writing"
    left.mkdir()
    (left / "stray.safetensors").touch()
    export(tiny.log, 1, tmp_path / "out", tiny.base)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in left.iterdir()] == ["stray.safetensors"]


def test_an_export_into_the_empty_working_directory_is_written(
    tiny: tiny_log.TinyLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(tiny.log, 1, Path("."), tiny.base)
    assert tiny_log.same(dict(open_checkpoint(tmp_path / "here")), tiny.models[1])
