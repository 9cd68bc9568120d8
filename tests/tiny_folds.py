"""Folds and anchors of a tiny log, made from the models at both ends rather than from what lies between.

Holds no assertions.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiny_log

from vllm_delta_sync.log import anchors, names, payload
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.catalog import Anchor, Catalog, Fold
from vllm_delta_sync.wire.checkpoint import write_checkpoint
from vllm_delta_sync.wire.manifest import AnchorFile, AnchorRef, Found, ObjectRef, ShardRef, TableRef, Totals
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.table import VersionTable

RUN = "0" * 32
DIGEST = "0" * 64
UUID = "f" * 32


def reference(tiny: tiny_log.TinyLog, version: int) -> ObjectRef:
    """What leads to the manifest of a version."""
    log = tiny.log
    return Route(log).reference(log.latest(), version)


def add_fold(tiny: tiny_log.TinyLog, source: int, to: int) -> Fold:
    """Write a fold and the catalog with it."""
    packed = pack(tiny_log.updates_between(tiny.models[source], tiny.models[to]), 1 << 20)
    keys = names.shards(names.fold_prefix(source, to), uuid.uuid4().hex, len(packed.shards))
    written = payload.write(tiny.log.store, Ends(tiny.log.run, source, to), packed, keys)
    roots = [state_hash.state_root(tiny_log.lanes_of(tiny.models[version])) for version in (source, to)]
    totals = tiny.log.tip().totals
    fold = Fold(
        source=source,
        to=to,
        before=roots[0],
        after=roots[1],
        manifest=reference(tiny, to),
        table=written.table,
        shards=written.shards,
        totals=written.totals(totals.tensors, totals.elements),
    )
    change(tiny, lambda catalog: catalog.model_copy(update={"folds": (*catalog.folds, fold)}))
    return fold


def add_anchor(tiny: tiny_log.TinyLog, version: int) -> Anchor:
    """Write an anchor and the catalog with it."""
    store, model = tiny.log.store, tiny.models[version]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = anchors.write(store, version, write_checkpoint(Path(directory), model.values()))
    lanes = dict(sorted(tiny_log.lanes_of(model).items(), key=lambda item: item[0].name.encode()))
    data = VersionTable(tuple(lanes), np.array(list(lanes.values()), np.uint32), ()).to_bytes()
    key = names.states(version, uuid.uuid4().hex)
    store.put(key, data, create=True)
    anchor = Anchor(
        version=version,
        state_root=state_hash.state_root(lanes),
        manifest=reference(tiny, version),
        checkpoint=checkpoint,
        table=Found(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data)),
        bytes=sum(file.size for file in checkpoint.files),
    )
    change(tiny, lambda catalog: catalog.model_copy(update={"anchors": (*catalog.anchors, anchor)}))
    return anchor


def change(tiny: tiny_log.TinyLog, made: Callable[[Catalog], Catalog]) -> Catalog:
    """Put another catalog."""
    return tiny.writer.put_catalog(made)


def _manifest(version: int) -> ObjectRef:
    return ObjectRef(key=names.manifest(version, UUID), sha256=DIGEST, size=100)


def stated_fold(source: int, to: int, size: int = 100) -> Fold:
    """What a catalog says of a fold of so many bytes, for decisions that read no object."""
    key = names.shards(names.fold_prefix(source, to), UUID, 1)[0]
    return Fold(
        source=source,
        to=to,
        before=DIGEST,
        after=DIGEST,
        manifest=_manifest(to),
        table=TableRef(start=8, size=1, sha256=DIGEST),
        shards=(ShardRef(key=key, sha256=DIGEST, size=size, data_start=9),),
        totals=Totals(tensors=1, elements=1, changed=1, bytes=size),
    )


def stated_anchor(version: int) -> Anchor:
    """What a catalog says of an anchor of 1010 bytes, for decisions that read no object."""
    prefix = names.anchor(version)
    return Anchor(
        version=version,
        state_root=DIGEST,
        manifest=_manifest(version),
        checkpoint=AnchorRef(
            prefix=prefix, files=(AnchorFile(key=f"{prefix}/model.safetensors", sha256=DIGEST, size=1000),)
        ),
        table=Found(key=names.states(version, UUID), sha256=DIGEST, size=10),
        bytes=1000,
    )
