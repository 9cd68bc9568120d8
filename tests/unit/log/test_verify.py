"""Verify checks all that LATEST leads to: deltas, folds either way, anchors, and what the catalog says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_folds
import tiny_log

from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.wire.catalog import Catalog


@pytest.fixture(scope="module")
def rich_template(tmp_path_factory: pytest.TempPathFactory) -> tiny_log.TinyLog:
    """Four versions, the folds 0→2, 2→4 and 4→1, and an anchor at 3."""
    tiny = tiny_log.build(tmp_path_factory.mktemp("rich"), 4)
    for source, to in ((0, 2), (2, 4), (4, 1)):
        tiny_folds.add_fold(tiny, source, to)
    tiny_folds.add_anchor(tiny, 3)
    return tiny


@pytest.fixture
def rich(rich_template: tiny_log.TinyLog, tmp_path: Path) -> tiny_log.TinyLog:
    return tiny_log.copy(rich_template, tmp_path)


def faults(tiny: tiny_log.TinyLog) -> list[tuple[int, str]]:
    return [(fault.version, fault.cause) for fault in checks.verify(tiny.log).faults]


def test_a_sound_log_is_counted_whole(rich: tiny_log.TinyLog) -> None:
    seen: list[tuple[int, int]] = []
    verdict = checks.verify(rich.log, progress=lambda _, done, total: seen.append((done, total)))
    assert verdict.faults == ()
    assert (verdict.versions, verdict.folds, verdict.anchors) == (5, 3, 1)
    folds, chain = rich.log.catalog().folds, rich.log.manifests()
    assert verdict.bytes == sum(one.totals.bytes for one in chain) + sum(one.totals.bytes for one in folds)
    assert verdict.blocks == sum(len(rich.log.table(one).blocks) for one in chain) + sum(
        len(rich.log.table(one).blocks) for one in folds
    )
    assert seen == [(done, 9) for done in range(10)]


@pytest.mark.parametrize("oldest", [2, 3])
def test_a_log_whose_first_deltas_are_gone_is_sound(rich: tiny_log.TinyLog, oldest: int) -> None:
    rich.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": oldest}))
    for version in range(1, oldest + 1):
        shards = rich.log.manifest(tiny_folds.reference(rich, version)).shards
        for shard in shards:
            rich.object(shard.key).unlink()
    found = checks.verify(rich.log)
    assert (found.versions, found.faults) == (5 - oldest, ())
    tiny_log.damage(rich.object(rich.log.catalog().folds[0].shards[0].key))
    assert faults(rich) == [(2, "digest")]


def test_a_wrong_state_root_is_found_where_only_a_fold_leads_to_the_deltas(rich: tiny_log.TinyLog) -> None:
    rich.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 2, "anchors": ()}))
    model = tiny_log.changed_model(rich.models[-1], 9)
    rich.writer.commit(tiny_log.updates_between(rich.models[-1], model), state_root="0" * 64)
    assert faults(rich) == [(5, "state_hash")]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_damage_to_a_fold_is_found(rich: tiny_log.TinyLog, number: int) -> None:
    fold = rich.log.catalog().folds[number]
    tiny_log.damage(rich.object(fold.shards[0].key))
    assert faults(rich) == [(fold.to, "digest")]
    rich.object(fold.shards[0].key).unlink()
    assert faults(rich) == [(fold.to, "not_found")]


def test_damage_to_an_anchor_is_found(rich: tiny_log.TinyLog) -> None:
    (anchor,) = rich.log.catalog().anchors
    tiny_log.damage(rich.object(anchor.checkpoint.files[0].key))
    rich.object(anchor.table.key).unlink()
    assert faults(rich) == [(3, "digest"), (3, "not_found")]


def _fold(number: int, **changes: object) -> Callable[[Catalog], Catalog]:
    def change(catalog: Catalog) -> Catalog:
        folds = list(catalog.folds)
        folds[number] = folds[number].model_copy(update=changes)
        return catalog.model_copy(update={"folds": tuple(folds)})

    return change


def _anchor(**changes: object) -> Callable[[Catalog], Catalog]:
    return lambda catalog: catalog.model_copy(update={"anchors": (catalog.anchors[0].model_copy(update=changes),)})


def test_what_the_catalog_states_wrongly_is_found(rich: tiny_log.TinyLog) -> None:
    elsewhere = tiny_folds.reference(rich, 2)
    for change, expected in (
        (_fold(0, before="1" * 64), [(2, "state_hash")]),
        (_fold(1, after="1" * 64), [(4, "state_hash"), (4, "state_hash")]),  # not the target's, not the tables'
        (_fold(2, manifest=elsewhere), [(1, "version_gap")]),
        (_anchor(manifest=elsewhere), [(3, "version_gap")]),
        (_anchor(state_root="1" * 64), [(3, "state_hash"), (3, "malformed")]),
    ):
        whole = rich.log.catalog()
        rich.writer.put_catalog(change)
        assert faults(rich) == expected
        rich.writer.put_catalog(lambda _, whole=whole: whole)  # type: ignore[misc]
    assert faults(rich) == []


def test_a_fold_from_beyond_the_tip_is_still_read(rich: tiny_log.TinyLog) -> None:
    rich.writer.put_catalog(_fold(2, source=9))
    assert (1, "malformed") in faults(rich), "its shards say that they begin at another version"
