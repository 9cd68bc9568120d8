"""Folds and anchors written from the log alone lead where they say, and the catalog comes to name them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_log

from tests.unit.log.replicas import assert_at
from vllm_delta_sync.errors import ConfigError, VersionGap
from vllm_delta_sync.log import FoldSchedule
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.amend import amend
from vllm_delta_sync.log.anchoring import with_anchors, write_anchor
from vllm_delta_sync.log.anchors import fetch
from vllm_delta_sync.log.folding import write_fold, write_scheduled
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.schedule import with_folds
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.hop import Hop


@pytest.mark.parametrize(("source", "to"), [(0, 3), (1, 3), (2, 3), (3, 0), (3, 1), (2, 1)])
def test_a_fold_leads_from_one_version_to_any_other(tiny: tiny_log.TinyLog, source: int, to: int) -> None:
    fold = write_fold(tiny.log, source, to, tiny.base)
    replica = Replica(tiny.log, tiny.base)
    replica.go_to(tiny.log.latest(), source)
    replica.apply(Hop.over(fold, fold.manifest))
    assert_at(replica, tiny, to)


def test_a_fold_of_folds_needs_no_deltas(tiny: tiny_log.TinyLog) -> None:
    made = [write_fold(tiny.log, 0, 2), write_fold(tiny.log, 2, 3)]
    amend(tiny.log, lambda catalog, _: with_folds(catalog, made).model_copy(update={"oldest": 2}))
    for version in (1, 2):
        for path in (tiny.run_dir / "versions" / f"{version:020d}").glob("*.safetensors"):
            path.unlink()
    replica = Replica(tiny.log, tiny.base)
    made = write_fold(tiny.log, 0, 3)
    replica.apply(Hop.over(made, made.manifest))
    assert_at(replica, tiny, 3)


def test_where_deltas_are_gone_and_no_fold_leads_on_none_is_written(tiny: tiny_log.TinyLog) -> None:
    amend(tiny.log, lambda catalog, _: catalog.model_copy(update={"oldest": 2}))
    with pytest.raises(VersionGap):
        write_fold(tiny.log, 0, 3, tiny.base)


def test_a_way_back_over_values_needs_the_base(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 2)
    tiny.base.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="base"):
        write_fold(tiny.log, 2, 0)
    assert write_fold(tiny.log, 2, 0, tmp_path / "elsewhere").to == 0


@pytest.mark.parametrize(("source", "to"), [(0, 4), (4, 0), (-1, 2)])
def test_a_fold_to_a_version_that_does_not_exist_is_refused(tiny: tiny_log.TinyLog, source: int, to: int) -> None:
    with pytest.raises(VersionGap):
        write_fold(tiny.log, source, to, tiny.base)


def test_the_folds_of_a_schedule_are_written_once(tiny: tiny_log.TinyLog) -> None:
    schedule = FoldSchedule(base=2, levels=1, reach=3, stride=1)
    made = write_scheduled(tiny.log, schedule)
    assert [(fold.source, fold.to) for fold in made] == [(0, 2), (0, 3)]
    assert write_scheduled(tiny.log, schedule) == []
    assert [(fold.source, fold.to) for fold in tiny.log.catalog().folds] == [(0, 2), (0, 3)]
    assert checks.verify(tiny.log).faults == ()
    replica = Replica(tiny.log, tiny.base)
    replica.follow(tiny.log.latest())
    assert_at(replica, tiny, 3)


def test_a_publisher_goes_on_from_a_catalog_that_was_amended(tiny: tiny_log.TinyLog) -> None:
    write_scheduled(tiny.log, FoldSchedule(base=2, levels=1, reach=0))
    tiny.publish(tiny_log.changed_model(tiny.models[-1], 9))
    assert [(fold.source, fold.to) for fold in tiny.log.catalog().folds] == [(0, 2)]
    assert tiny.log.latest().version == 4


@pytest.mark.parametrize("file_bytes", [1 << 30, 3000], ids=["one file", "several files"])
def test_an_anchor_is_an_ordinary_checkpoint_and_a_way_to_its_version(
    tiny: tiny_log.TinyLog, tmp_path: Path, file_bytes: int
) -> None:
    made = write_anchor(tiny.log, 2, tiny.base, file_bytes=file_bytes)
    amend(tiny.log, lambda catalog, _: with_anchors(catalog, [made]))
    directory = tmp_path / "anchor"
    directory.mkdir()
    fetch(tiny.log.store, made.checkpoint, directory)
    found = open_checkpoint(directory)
    for name, (spec, bits) in tiny.models[2].items():
        assert found[name][0] == spec
        np.testing.assert_array_equal(found[name][1], bits)
    assert (directory / "config.json").read_bytes() == (tiny.base / "config.json").read_bytes()
    hop = Replica(tiny.log, tiny.base).route.next_hop(tiny.log.latest(), None, None, 2)
    assert hop is not None and hop.kind == "anchor"
    assert_at(Replica.at_anchor(tiny.log, hop, directory), tiny, 2)
    assert checks.verify(tiny.log).faults == ()


def test_an_anchor_carries_tensors_that_are_not_published(tmp_path: Path) -> None:
    tiny = tiny_log.build(tmp_path, 1)
    frozen = tiny_log.TensorSpec("vision.frozen", "BF16", (3,)), np.arange(3, dtype=np.uint16)
    tiny_log.write_checkpoint(tiny.base, [*tiny.models[0].values(), frozen])
    made = write_anchor(tiny.log, 1, tiny.base)
    (tmp_path / "anchor").mkdir()
    fetch(tiny.log.store, made.checkpoint, tmp_path / "anchor")
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "anchor")["vision.frozen"][1], frozen[1])


def test_the_base_gets_no_second_anchor(tiny: tiny_log.TinyLog) -> None:
    with pytest.raises(ConfigError, match="base"):
        write_anchor(tiny.log, 0, tiny.base)
