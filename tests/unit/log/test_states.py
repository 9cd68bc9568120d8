"""A model finds its version by content, and the states of a run come cheapest first."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_folds
import tiny_log
from counting_store import CountingStore

from tests.unit.log.replicas import LENGTH
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.states import locate, states
from vllm_delta_sync.wire import state_hash


def _in_order(model: tiny_log.Model, tiny: tiny_log.TinyLog) -> np.ndarray:  # type: ignore[type-arg]
    lanes = tiny_log.lanes_of(model)
    return np.array([lanes[spec] for spec in tiny.log.base_table().tensors], np.uint32)


def test_the_states_of_a_run_come_cheapest_first_and_are_those_of_the_models(long: tiny_log.TinyLog) -> None:
    found = list(states(long.log, long.log.latest(), long.log.base_table()))
    assert [place.version for place in found] == [0, 4, 1, 2, 3, 5, 6]
    for place in found:
        np.testing.assert_array_equal(place.lanes, _in_order(long.models[place.version], long))
        assert place.ref.sha256 == tiny_folds.reference(long, place.version).sha256
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"oldest": 4}))
    for version in (1, 2, 3):
        long.object(tiny_folds.reference(long, version).key).unlink()
    assert [place.version for place in states(long.log, long.log.latest(), long.log.base_table())] == [0, 4, 5, 6]
    long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"anchors": ()}))  # now by the fold to 4
    assert [place.version for place in states(long.log, long.log.latest(), long.log.base_table())] == [0, 5, 6]


@pytest.mark.parametrize("version", range(LENGTH + 1))
@pytest.mark.parametrize("whole", [True, False], ids=["by state root", "by lanes"])
def test_a_model_finds_its_version_by_content(long_template: tiny_log.TinyLog, version: int, whole: bool) -> None:
    tiny = long_template
    base = tiny.log.base_table()
    judged = np.full(len(base.tensors), True)
    judged[1] = whole
    lanes = _in_order(tiny.models[version], tiny)
    given = lanes.copy()
    given[~judged] = 0
    place = locate(tiny.log, tiny.log.latest(), base, given, judged)
    assert place is not None
    assert (place.version, place.root) == (version, state_hash.state_root(tiny_log.lanes_of(tiny.models[version])))
    assert place.ref.sha256 == tiny_folds.reference(tiny, version).sha256
    np.testing.assert_array_equal(place.lanes, lanes)
    given[2, 3] ^= 1
    assert locate(tiny.log, tiny.log.latest(), base, given, judged) is None


@pytest.mark.parametrize("whole", [True, False], ids=["by state root", "by lanes"])
@pytest.mark.parametrize(
    ("entries", "version", "is_found"),
    [(True, 6, True), (True, 5, True), (True, 4, True), (True, 2, False), (False, 2, False), (False, 0, True)],
)
def test_only_the_newest_of_many_versions_are_looked_through_one_by_one(
    long: tiny_log.TinyLog, monkeypatch: pytest.MonkeyPatch, entries: bool, version: int, is_found: bool, whole: bool
) -> None:
    monkeypatch.setattr("vllm_delta_sync.log.states.NEWEST", 2)
    if not entries:
        long.writer.put_catalog(lambda catalog: catalog.model_copy(update={"folds": (), "anchors": ()}))
    store = CountingStore(long.log.store)
    log = DeltaLog(store, long.log.run)
    base, pointer = log.base_table(), log.latest()
    judged = np.full(len(base.tensors), True)
    judged[1] = whole
    store.gets.clear()
    place = locate(log, pointer, base, _in_order(long.models[version], long), judged)
    assert (place is not None and place.version == version) == is_found
    far = [key for key, _, _ in store.gets if key.startswith("versions/") and int(key.split("/")[1]) in (1, 2, 3)]
    assert not far
