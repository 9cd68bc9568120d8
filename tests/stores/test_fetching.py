"""Readers of one node fetch what they need from every store, and ask a Hub for nothing that it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_log
from tests.hub.process import HubProcess
from vllm_delta_sync.config import HfStoreConfig
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.manifest import BaseRef, Manifest

PARTS = (Needs({"embed.weight": ((0, 99),)}), Needs({"layers.0.proj": ((7, 8),), "layers.1.steps": ((0, 6),)}))


def publish(store: Store) -> tuple[DeltaLog, Manifest]:
    """One version after the base."""
    old = tiny_log.random_model()
    new = tiny_log.changed_model(old, 1)
    writer = LogWriter.create(store, tiny_log.lanes_of(old), base=BaseRef(model="tiny"))
    root = state_hash.state_root(tiny_log.lanes_of(new))
    manifest = writer.commit(tiny_log.updates_between(old, new), state_root=root)
    return writer.log, manifest


def fetched(reader: Fetcher, manifest: Manifest) -> dict[str, bytes]:
    return {str(block): data for block, data in reader.blocks(manifest, reader.table(manifest))}


@pytest.mark.parametrize("needs", [PARTS, (Needs.everything(), PARTS[0])], ids=["parts", "everything"])
def test_readers_of_one_node_fetch_from_any_store_once(store: Store, tmp_path: Path, needs: tuple[Needs, ...]) -> None:
    log, manifest = publish(store)
    right = {str(block): bytes(data) for block, data in log.blocks(manifest, log.table(manifest).blocks)}
    readers = [Fetcher(log.store, NodeCache(tmp_path / "cache", 1 << 20), need) for need in needs]
    found = [fetched(reader, manifest) for reader in readers]
    for blocks, need in zip(found, needs, strict=True):
        assert blocks == {str(block): right[str(block)] for block in log.table(manifest).blocks if need.wants(block)}
    first, second = readers
    assert 0 < first.fetched_bytes <= 1.1 * first.needed_bytes or first.fetched_bytes == manifest.totals.bytes
    assert second.fetched_bytes == 0 < second.cached_bytes


def test_a_manifest_s_content_ids_spare_the_hub(running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: HubProcess = running.hub()
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    log, manifest = publish(open_store(HfStoreConfig(bucket="tests/fetching")))
    reading = DeltaLog.open(open_store(HfStoreConfig(bucket="tests/fetching")), log.run)
    hub.control(forget_counts=True)
    for number, needs in enumerate((*PARTS, Needs.everything())):
        cache = NodeCache(tmp_path / str(number), 1 << 20)
        assert fetched(Fetcher(reading.store, cache, needs), manifest)
    counts = hub.counts()
    assert (counts.get("api", 0), counts.get("token", 0), counts.get("resolver", 0)) == (1, 1, 0)
