"""A write that fails, or whose answer is lost, is settled or told, and leaves no objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_log

from vllm_delta_sync.errors import ConfigError, Unavailable, UnsettledWrite
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.store import ObjectInfo, Store, open_store
from vllm_delta_sync.wire import frames
from vllm_delta_sync.wire.checkpoint import write_checkpoint


class _Failing:
    """A store whose writes of keys that end with `part` fail, before or after they took effect, `times` times.

    `mute`: it cannot be read either once one has failed.
    """

    def __init__(self, store: Store, part: str, *, arrives: bool, times: int = 1, mute: bool = False) -> None:
        self._store, self._part, self._arrives, self._left, self._mute = store, part, arrives, times, mute
        self._failed = False
        self.puts = 0

    def __getattr__(self, name: str) -> object:
        if name == "batch":  # every write comes through `put`
            raise AttributeError(name)
        return getattr(self._store, name)

    def head(self, key: str) -> ObjectInfo:
        if self._failed and self._mute:
            raise Unavailable("the store is away")
        return self._store.head(key)

    def put(self, key: str, data: frames.Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo | None:
        self.puts += 1
        failing = key.endswith(self._part) and self._left > 0
        info = None if failing and not self._arrives else self._store.put(key, data, create=create, over=over)
        if failing:
            self._left -= 1
            self._failed = True
            raise Unavailable("the answer was lost")
        return info


@pytest.mark.parametrize("arrives", [False, True])
def test_a_lost_answer_to_the_last_write_is_settled_by_what_latest_says(tiny: tiny_log.TinyLog, arrives: bool) -> None:
    before = tiny.log.tip()
    store = _Failing(tiny.log.store, "LATEST", arrives=arrives)
    writer = LogWriter.attach(DeltaLog(store, tiny.log.run))  # type: ignore[arg-type]
    if arrives:
        writer.commit([], state_root=before.state_root)
        assert tiny.log.tip() == writer.tip
        assert writer.tip.version == 4
        assert store.puts == 2 + 2  # shard, manifest, LATEST, and LATEST again: what can be read is not yet durable
    else:
        with pytest.raises(Unavailable):
            writer.commit([], state_root=before.state_root)
        assert tiny.log.tip() == writer.tip == before


@pytest.mark.parametrize("trouble", [{"times": 2}, {"mute": True}], ids=["never durable", "not to be read"])
def test_a_write_of_latest_that_cannot_be_settled_asks_for_a_resume(tiny: tiny_log.TinyLog, trouble: dict) -> None:  # type: ignore[type-arg]
    before = tiny.log.tip()
    store = _Failing(tiny.log.store, "LATEST", arrives=True, **trouble)
    writer = LogWriter.attach(DeltaLog(store, tiny.log.run))  # type: ignore[arg-type]
    with pytest.raises(UnsettledWrite, match="resume=True"):
        writer.commit([], state_root=before.state_root)
    assert writer.tip == before
    assert tiny.log.table(tiny.log.tip()).tensors == (), "what LATEST may name must not be removed"
    LogWriter.attach(tiny.log).commit([], state_root=before.state_root)
    assert tiny.log.tip().version == 5


@pytest.mark.parametrize("part", [".safetensors", ".manifest.json"])
@pytest.mark.parametrize("arrives", [False, True])
def test_an_attempt_that_fails_leaves_no_objects(tiny: tiny_log.TinyLog, part: str, arrives: bool) -> None:
    keys = list(tiny.log.store.list())
    store = _Failing(tiny.log.store, part, arrives=arrives)
    tiny.writer = LogWriter.attach(DeltaLog(store, tiny.log.run))  # type: ignore[arg-type]
    model = tiny_log.changed_model(tiny.models[-1], 4)
    with pytest.raises(Unavailable):
        tiny.publish(model)
    assert list(tiny.log.store.list()) == keys
    tiny.publish(model)
    assert tiny_log.same(tiny.log.materialize(4, tiny.base), model)


def test_a_run_whose_beginning_fails_leaves_no_anchor(tmp_path: Path) -> None:
    model = tiny_log.random_model()
    files = write_checkpoint(tmp_path / "base", model.values())
    root = open_store(str(tmp_path / "bucket"))
    store = _Failing(root, ".manifest.json", arrives=True)
    with pytest.raises(Unavailable):
        LogWriter.create(store, tiny_log.lanes_of(model), base=None, anchor=files)  # type: ignore[arg-type]
    assert list(root.list()) == []


def test_an_anchor_with_a_name_that_no_key_allows_is_refused_before_its_weights_are_written(tmp_path: Path) -> None:
    model = tiny_log.random_model()
    files = write_checkpoint(tmp_path / "base", model.values())
    stray = tmp_path / "base" / "my file.json"
    stray.write_text("{}")
    with pytest.raises(ConfigError, match=r"my file\.json cannot be part of an anchor"):
        LogWriter.create(str(tmp_path / "bucket"), tiny_log.lanes_of(model), base=None, anchor=[*files, stray])
    assert not (tmp_path / "bucket").exists()
