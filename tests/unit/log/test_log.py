"""The log keeps what was committed, in order, and gives back the model at every version bit for bit."""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny_log
from safetensors import safe_open

from vllm_delta_sync.errors import (
    AlreadyExists,
    BaseMismatch,
    ConfigError,
    DigestMismatch,
    NotFound,
    RivalWriter,
    StateHashMismatch,
    Unavailable,
    UnsettledWrite,
    VersionGap,
)
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.export import export
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.store import ObjectInfo, Store, open_store
from vllm_delta_sync.wire import frames
from vllm_delta_sync.wire.checkpoint import open_checkpoint, write_checkpoint
from vllm_delta_sync.wire.manifest import BaseRef


def test_every_version_materialises_to_exactly_the_published_bits(tiny: tiny_log.TinyLog) -> None:
    for version, model in enumerate(tiny.models):
        assert tiny_log.same(tiny.log.materialize(version, tiny.base), model)


def test_the_base_may_be_tensors_and_they_are_not_written_to(tiny: tiny_log.TinyLog) -> None:
    base = tiny_log.random_model()
    assert tiny_log.same(tiny.log.materialize(3, base), tiny.models[3])
    assert tiny_log.same(base, tiny.models[0])


def test_without_a_base_the_directory_that_version_0_names_is_used(tiny: tiny_log.TinyLog) -> None:
    assert tiny_log.same(tiny.log.materialize(2), tiny.models[2])


def test_without_a_base_the_anchor_of_the_run_is_used(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 2, anchor=True)
    for file in tiny.base.iterdir():
        file.unlink()
    assert tiny_log.same(tiny.log.materialize(2), tiny.models[2])


def test_a_log_that_offers_no_base_asks_for_one(tmp_path: Path) -> None:
    model = tiny_log.random_model()
    LogWriter.create(str(tmp_path), tiny_log.lanes_of(model), base=BaseRef(model="someone/model"))
    with pytest.raises(ConfigError, match="'someone/model', which is no directory here"):
        DeltaLog.open(tmp_path).materialize(0)


def test_a_base_that_differs_in_one_bit_is_refused_by_the_name_of_the_tensor(tiny: tiny_log.TinyLog) -> None:
    base = tiny_log.random_model()
    base["layers.0.proj"][1][7] ^= 1
    with pytest.raises(BaseMismatch, match=r"layers\.0\.proj"):
        tiny.log.materialize(0, base)


def test_a_base_that_lacks_a_tensor_is_refused_by_its_name(tiny: tiny_log.TinyLog) -> None:
    base = tiny_log.random_model()
    del base["layers.1.mask"]
    with pytest.raises(BaseMismatch, match=r"no tensor 'layers\.1\.mask'"):
        tiny.log.materialize(0, base)


def test_a_version_that_does_not_exist_is_a_gap(tiny: tiny_log.TinyLog) -> None:
    with pytest.raises(VersionGap, match="holds 0 to 3"):
        tiny.log.materialize(4, tiny.base)


def test_a_wrong_state_root_is_refused(tiny: tiny_log.TinyLog) -> None:
    model = tiny_log.changed_model(tiny.models[-1], 9)
    tiny.writer.commit(tiny_log.updates_between(tiny.models[-1], model), state_root="0" * 64)
    with pytest.raises(StateHashMismatch, match="state root"):
        tiny.log.materialize(4, tiny.base)
    assert [fault.cause for fault in checks.verify(tiny.log).faults] == ["state_hash"]


def test_a_delta_against_other_weights_than_the_parent_is_refused_by_tensor(tiny: tiny_log.TinyLog) -> None:
    model = tiny_log.changed_model(tiny.models[0], 9)
    tiny.models.append(tiny.models[0])
    tiny.publish(model)
    with pytest.raises(StateHashMismatch, match="leaves tensor"):
        tiny.log.materialize(4, tiny.base)


def test_a_version_without_changes_is_a_version(tiny: tiny_log.TinyLog) -> None:
    manifest = tiny.publish(tiny.models[-1])
    assert (manifest.version, manifest.totals.changed, len(manifest.shards)) == (4, 0, 1)
    assert tiny_log.same(tiny.log.materialize(4, tiny.base), tiny.models[3])


def test_manifests_state_step_totals_and_parents(tiny: tiny_log.TinyLog) -> None:
    chain = tiny.log.manifests()
    assert [manifest.version for manifest in chain] == [0, 1, 2, 3]
    assert [manifest.step for manifest in chain] == [None, 10, 20, 30]
    for parent, manifest in pairwise(chain):
        assert manifest.parent is not None
        assert manifest.parent.sha256 == hashlib.sha256(parent.to_bytes()).hexdigest()
        assert manifest.totals.changed > 0
    elements = sum(spec.numel for spec in tiny_log.SPECS)
    assert {(m.totals.tensors, m.totals.elements) for m in chain} == {(len(tiny_log.SPECS), elements)}


def test_sequence_grows_by_one_at_each_write_of_latest(tiny: tiny_log.TinyLog) -> None:
    before = tiny.log.latest()
    tiny.publish(tiny.models[-1])
    after = tiny.log.latest()
    assert (after.sequence, after.version) == (before.sequence + 1, before.version + 1)


def test_a_chain_holds_the_versions_after_one(tiny: tiny_log.TinyLog) -> None:
    log, tip = tiny.log, tiny.log.tip()
    assert [manifest.version for manifest in log.chain(1, tip)] == [2, 3]
    assert log.chain(3, tip) == []
    with pytest.raises(VersionGap, match="go forward"):
        log.chain(4, tip)


def test_nothing_published_yet_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="RUN"):
        DeltaLog.open(tmp_path / "nothing")


def test_attach_continues_the_run(tiny: tiny_log.TinyLog) -> None:
    tiny.writer = LogWriter.attach(tiny.log)
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 4))
    assert tiny_log.same(tiny.log.materialize(4, tiny.base), tiny.models[4])


def test_the_second_of_two_writers_is_refused_and_the_first_version_stays(tiny: tiny_log.TinyLog) -> None:
    rival = LogWriter.attach(tiny.log)
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 4))
    before = tiny.log.latest()
    with pytest.raises(RivalWriter, match="another publisher writes to this run"):
        rival.commit([], state_root=rival.tip.state_root)
    assert tiny.log.latest() == before


def test_a_new_run_takes_over_and_the_old_one_stays_readable(tiny: tiny_log.TinyLog) -> None:
    old = tiny.log.run
    LogWriter.create(str(tiny.bucket), tiny_log.lanes_of(tiny.models[-1]), base=BaseRef(model="next"))
    assert tiny.log.run != old
    assert DeltaLog.open(tiny.bucket, old).tip().version == 3


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


def test_blocks_are_spread_over_shards_and_a_version_of_many_shards_materialises(tiny: tiny_log.TinyLog) -> None:
    log = tiny.log
    tiny.writer = LogWriter(log, log.latest(), log.tip(), shard_bytes=1024)
    manifest = tiny.publish(tiny_log.changed_model(tiny.models[-1], 5, share=0.9))
    assert len(manifest.shards) > 2
    assert tiny_log.same(log.materialize(4, tiny.base), tiny.models[4])
    assert checks.verify(log).faults == ()


def test_payloads_are_packed_without_copies(tiny: tiny_log.TinyLog) -> None:
    updates = tiny_log.updates_between(tiny.models[0], tiny.models[1])
    streams = [stream for shard in pack(updates, 1 << 20).shards for stream in shard]
    given = [stream for update in updates for _, _, block in update.blocks for stream in (block.index, block.value)]
    assert {id(stream) for stream in streams} == {id(stream) for stream in given}


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


def test_verify_counts_what_it_walked_and_reports_progress(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 2, anchor=True)
    seen: list[tuple[str, int, int]] = []
    verdict = checks.verify(tiny.log, progress=lambda *report: seen.append(report))
    assert verdict.faults == ()
    assert verdict.versions == 3
    assert verdict.blocks == sum(len(tiny.log.table(manifest).blocks) for manifest in tiny.log.manifests())
    assert seen == [("verifying", done, 3) for done in range(4)]


def test_verify_lists_every_fault_and_goes_on(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 3, anchor=True)
    chain = tiny.log.manifests()
    anchor = chain[0].anchor
    assert anchor is not None
    for key in (chain[1].shards[0].key, chain[3].shards[0].key, anchor.files[0].key):
        path = tiny.object(key)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    faults = checks.verify(tiny.log).faults
    assert [(fault.version, fault.cause) for fault in faults] == [(0, "digest"), (1, "digest"), (3, "digest")]


def test_a_damaged_anchor_is_refused_before_it_is_read(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 1, anchor=True)
    path = tiny.object("anchors/00000000000000000000/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        tiny.log.materialize(1)


def test_the_store_of_a_run_holds_only_the_objects_of_the_protocol(tiny: tiny_log.TinyLog) -> None:
    keys = list(open_store(str(tiny.bucket)).list())
    run = tiny.log.run
    assert {"RUN", f"{run}/LATEST"} <= set(keys)
    assert len(keys) == 2 + 4 + sum(len(manifest.shards) for manifest in tiny.log.manifests())
    with pytest.raises(AlreadyExists):
        tiny.log.store.put("LATEST", b"", create=True)
