"""tests/golden pins the format: it is read to the bits that it was made of, and the same gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import golden_log
import numpy as np
import pytest
import tiny_log
import zstandard

from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.hop import Hop

ROOTS = (
    "39b69a1009f71469ba98ac496664e29f680ab9ae5ebfffecc0c45f85d7aa66f8",
    "9e308a7738b051d23118e4956660941dc874103bd8ae65216481e63c2cd425b2",
    "003bc3e36ab2b540dae254988a391103c4be5ef33b0790869a4f0554a40ecc3d",
)
CODECS = {1: [("embed", 1, 3)], 2: [("embed", 1, 2), ("norm", 2, 2), ("scale", 0, 1)]}


@pytest.fixture(scope="module")
def log() -> DeltaLog:
    return DeltaLog.open(golden_log.GOLDEN)


def test_the_golden_log_is_read_to_the_model_that_it_was_made_of(log: DeltaLog) -> None:
    assert checks.verify(log).faults == ()
    for version, expected in enumerate(golden_log.models()):
        found = log.materialize(version)
        assert found.keys() == expected.keys()
        for name, (spec, bits) in expected.items():
            assert found[name][0] == spec
            np.testing.assert_array_equal(found[name][1], bits)


def test_its_manifests_and_latest_say_what_they_said(log: DeltaLog) -> None:
    chain, pointer = log.manifests(), log.latest()
    assert tuple(manifest.state_root for manifest in chain) == ROOTS
    assert [(m.version, m.step, m.created, m.totals.changed) for m in chain] == [
        (0, None, 1_800_000_000.0, 0),
        (1, 10, 1_800_000_001.0, 3),
        (2, 20, 1_800_000_002.0, 5),
    ]
    assert (pointer.run, pointer.sequence, pointer.version, pointer.pin) == (golden_log.RUN, 3, 2, None)
    for version, expected in CODECS.items():
        blocks = log.table(chain[version]).blocks
        assert [(block.spec.name, block.codec, block.changed) for block in blocks] == expected


def test_its_fold_leads_from_the_base_to_the_tip(log: DeltaLog) -> None:
    (fold,) = log.catalog().folds
    assert (fold.source, fold.to, fold.before, fold.after) == (0, 2, ROOTS[0], ROOTS[2])
    assert fold.manifest == log.latest().manifest
    old, new = golden_log.models()[0], golden_log.models()[2]
    bits = {name: bits.copy() for name, (_, bits) in old.items()}
    table = log.table(Hop.over(fold, fold.manifest))
    for block, stored in log.blocks(Hop.over(fold, fold.manifest), table.blocks):
        decoded = decode_block(block, stored)
        part = bits[block.spec.name][block.start : block.start + block.count]
        part[decoded.positions] = decoded.new_bits(part[decoded.positions])
    for name, (_, expected) in new.items():
        np.testing.assert_array_equal(bits[name], expected)
    for spec, lanes in zip(table.tensors, table.hashes, strict=True):
        np.testing.assert_array_equal(lanes, state_hash.of_tensor(spec, new[spec.name][1]))


def test_of_the_two_changes_that_take_each_other_back_the_fold_has_nothing(log: DeltaLog) -> None:
    (fold,) = log.catalog().folds
    table = log.table(fold)
    positions = {
        block.spec.name: decode_block(block, stored).positions for block, stored in log.blocks(fold, table.blocks)
    }
    assert positions["embed"].tolist() == [6, 7, 200]


@pytest.mark.skipif(
    zstandard.ZSTD_VERSION != golden_log.ZSTD, reason="another version of zstd may compress the same to other bytes"
)
def test_the_same_content_is_written_to_the_same_bytes(tmp_path: Path) -> None:
    golden_log.write(tmp_path / "bucket")
    written, golden = golden_log.objects(tmp_path / "bucket"), golden_log.objects(golden_log.GOLDEN)
    assert written.keys() == golden.keys()
    for key, data in golden.items():
        assert written[key] == data, key


def test_the_worked_bytes_of_the_protocol_are_those_of_the_golden_log() -> None:
    text = golden_log.DOCUMENT.read_text()
    assert text.partition(golden_log.BEGIN)[2].partition(golden_log.END)[0].strip("\n") == golden_log.worked().strip(
        "\n"
    )


def test_the_model_is_what_the_protocol_says_of_it() -> None:
    first, second, _ = golden_log.models()
    changed = np.flatnonzero(first["embed"][1] != second["embed"][1])
    assert changed.tolist() == [5, 6, 200]
    assert first["embed"][1][:2].tolist() == [0x3C00, 0x3C01]
    assert state_hash.state_root(tiny_log.lanes_of(first)) == ROOTS[0]
