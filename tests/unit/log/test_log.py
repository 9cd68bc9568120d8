"""The log keeps what was committed, in order, and gives back the model at every version bit for bit."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_log

from vllm_delta_sync.errors import (
    AlreadyExists,
    BaseMismatch,
    ConfigError,
    DigestMismatch,
    NotFound,
    RivalWriter,
    StateHashMismatch,
    VersionGap,
)
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.store import open_store
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
