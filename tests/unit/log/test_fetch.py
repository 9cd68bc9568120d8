"""What references lead to is fetched by content where they state it, verified, and must fit what states it."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import tiny_folds
import tiny_log

from vllm_delta_sync.errors import DigestMismatch, MalformedObject, NotFound, VersionGap
from vllm_delta_sync.log import DeltaLog, fetch, names, payload, pointer
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.store import Content, ObjectInfo, Store
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import Found
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.table import VersionTable


class ContentStore:
    """A store whose objects are also found by the SHA-256 of their bytes; counts how they were asked for."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.by_content: dict[str, bytes] = {}
        self.asked: list[str] = []

    @property
    def uri(self) -> str:
        return self._inner.uri

    def head(self, key: str) -> ObjectInfo:
        data = self._inner.get(key)
        id_ = hashlib.sha256(data).hexdigest()
        self.by_content[id_] = data
        return dataclasses.replace(self._inner.head(key), content=id_)

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        self.asked.append("key" if content is None else "content")
        if content is None:
            return self._inner.get(key, start, end)
        if content.id not in self.by_content:
            raise NotFound(f"no content {content.id}")
        return self.by_content[content.id][start:end]


@pytest.fixture
def store(tiny: tiny_log.TinyLog) -> ContentStore:
    return ContentStore(tiny.log.store)


def found(tiny: tiny_log.TinyLog, data: bytes, content: str | None) -> Found:
    tiny.log.store.put("object", data)
    return Found(key="object", sha256=hashlib.sha256(data).hexdigest(), size=len(data), content=content)


def test_a_reference_with_content_is_fetched_by_it_alone(tiny: tiny_log.TinyLog, store: ContentStore) -> None:
    ref = found(tiny, b"data", "a" * 64)
    store.by_content["a" * 64] = b"data"
    assert fetch.verified(store, ref) == b"data"  # type: ignore[arg-type]
    assert fetch.verified_range(store, ref, 1, 2, hashlib.sha256(b"at").hexdigest()) == b"at"  # type: ignore[arg-type]
    assert store.asked == ["content", "content"]


@pytest.mark.parametrize("there", [None, b"dat", b"atad", b"data and more"])
def test_a_content_that_leads_nowhere_or_elsewhere_does_not_hide_the_object(
    tiny: tiny_log.TinyLog, store: ContentStore, there: bytes | None
) -> None:
    ref = found(tiny, b"data", "a" * 64)
    if there is not None:
        store.by_content["a" * 64] = there
    assert fetch.verified(store, ref) == b"data"  # type: ignore[arg-type]
    assert store.asked == ["content", "key"]
    if there != b"data and more":  # whose first bytes are right
        assert fetch.verified_range(store, ref, 0, 4, ref.sha256) == b"data"  # type: ignore[arg-type]
        assert store.asked[2:] == ["content", "key"]


def test_what_neither_content_nor_key_leads_to_is_refused(tiny: tiny_log.TinyLog, store: ContentStore) -> None:
    ref = found(tiny, b"data", "a" * 64)
    tiny.log.store.put("object", b"atad")
    with pytest.raises(DigestMismatch, match="object: SHA-256"):
        fetch.verified(store, ref)  # type: ignore[arg-type]
    with pytest.raises(DigestMismatch, match=r"object, bytes 0 to 4: SHA-256"):
        fetch.verified_range(store, ref, 0, 4, ref.sha256)  # type: ignore[arg-type]


def test_latest_is_fetched_by_the_content_that_a_look_told(tiny: tiny_log.TinyLog, store: ContentStore) -> None:
    log = DeltaLog(store, tiny.log.run)  # type: ignore[arg-type]
    seen = pointer.look(log)
    assert seen.pointer == tiny.log.latest()
    assert store.asked == ["content"]


# --- what must fit ---------------------------------------------------------------------------------------------------
def test_a_catalog_of_another_run_is_refused(tiny: tiny_log.TinyLog) -> None:
    ref = put_catalog(tiny.log.store, Catalog(run="ab" * 16), 1)
    pointer.update(tiny.log, lambda at: at.model_copy(update={"catalog": ref}))
    with pytest.raises(VersionGap, match=f"{ref.key}: of run {'ab' * 16}"):
        tiny.log.catalog()


@pytest.mark.parametrize("before", [False, True], ids=["never read", "read before"])
def test_followers_go_on_without_a_catalog_that_is_lost(tiny: tiny_log.TinyLog, before: bool) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    replica = Replica(tiny.log, tiny.base)
    if before:
        assert replica.route.catalog(tiny.log.latest()).folds
    lost = tiny_folds.add_fold(tiny, 0, 3)
    ref = tiny.log.latest().catalog
    assert ref is not None
    tiny.object(ref.key).unlink()
    hop = replica.route.next_hop(tiny.log.latest(), replica.held, 0, 3)
    assert hop is not None
    assert (hop.kind, hop.to) == (("fold", 2) if before else ("delta", 1))
    assert hop.to != lost.to
    replica.follow(tiny.log.latest())
    assert replica.version == 3


def test_a_base_that_is_not_version_0_is_refused(tiny: tiny_log.TinyLog) -> None:
    at = tiny.log.latest()
    wrong = at.model_copy(update={"base": at.manifest})
    with pytest.raises(VersionGap, match="LATEST says base 0, the manifest it names 3"):
        tiny.log.base(wrong)


def test_the_states_of_an_anchor_must_come_to_its_state_root(tiny: tiny_log.TinyLog) -> None:
    anchor = tiny_folds.add_anchor(tiny, 2)
    table = tiny.log.states(anchor.table, anchor.state_root)
    assert state_hash.state_root(dict(zip(table.tensors, table.hashes, strict=True))) == anchor.state_root
    with pytest.raises(MalformedObject, match="come to state root"):
        tiny.log.states(anchor.table, "0" * 64)
    with pytest.raises(MalformedObject, match="at most"):
        tiny.log.states(anchor.table.model_copy(update={"size": 1 << 40}), anchor.state_root)


def test_the_states_of_an_anchor_have_no_blocks(tiny: tiny_log.TinyLog) -> None:
    table = tiny.log.table(tiny.log.tip())
    data = table.to_bytes()
    tiny.log.store.put("t", data)
    with pytest.raises(MalformedObject, match="has no blocks"):
        tiny.log.states(Found(key="t", sha256=hashlib.sha256(data).hexdigest(), size=len(data)), "0" * 64)


def test_a_dense_block_of_a_fold_counts_all_that_it_lists(tiny: tiny_log.TinyLog) -> None:
    """Who reads ranges, and who reads whole, must expect the same number of positions."""
    old = tiny.models[0]
    new = tiny_log.changed_model(old, 1, share=0.9)
    updates = tiny_log.updates_between(old, new)
    packed = pack(updates, 1 << 20)
    rows = [block for block in packed.table.blocks if block.codec == 0 and block.changed < block.count]
    assert rows, "the change is large enough for a dense block"
    keys = names.shards(names.fold_prefix(0, 3), "0" * 32, 1)
    written = payload.write(tiny.log.store, Ends(tiny.log.run, 0, 3), packed, keys)
    fold = tiny_folds.add_fold(tiny, 0, 3).model_copy(
        update={"table": written.table, "shards": written.shards, "totals": written.totals(7, 10**6)}
    )
    with pytest.raises(MalformedObject, match="of a fold is dense"):
        tiny.log.table(fold)
    counted = tuple(
        dataclasses.replace(block, changed=block.count) if block.codec == 0 else block for block in packed.table.blocks
    )
    honest = VersionTable(packed.table.tensors, np.array(packed.table.hashes), counted)
    again = payload.write(
        tiny.log.store,
        Ends(tiny.log.run, 0, 3),
        dataclasses.replace(packed, table=honest),
        names.shards(names.fold_prefix(0, 3), "1" * 32, 1),
    )
    sound = fold.model_copy(update={"table": again.table, "shards": again.shards, "totals": again.totals(7, 10**6)})
    assert tiny.log.table(sound).blocks == counted
