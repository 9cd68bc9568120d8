"""Attacks 71–108, 116–118: LATEST, manifests and chains that lie. Outcome: a named refusal, and nothing is applied."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import forge
import numpy as np
import pytest
import tiny_folds
import tiny_log

from vllm_delta_sync.errors import DeltaSyncError, DigestMismatch, MalformedObject, NotFound, VersionGap
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log import verify as checks
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import BaseRef, LatestPointer
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

KEYS = [
    "/etc/passwd",
    "../RUN",
    "versions/../../RUN",
    "a//b",
    "./a",
    "a/.",
    "a\\..\\b",
    "%2e%2e/a",
    "a b",
    "",
    "a\n",
    "~",
]


@pytest.mark.parametrize("field", ["shards", "parent", "LATEST", "LATEST base", "LATEST catalog"])
def test_71_a_key_that_leads_out_of_the_run_is_refused(tiny: tiny_log.TinyLog, field: str) -> None:
    tip, path = tiny.log.tip().model_dump(mode="json"), tiny.run_dir / "LATEST"
    for key in KEYS:
        if field.startswith("LATEST"):
            pointer, name = json.loads(path.read_bytes()), field.removeprefix("LATEST ").replace("LATEST", "manifest")
            path.write_bytes(forge.dump(pointer | {name: pointer["manifest"] | {"key": key}}))
        elif field == "shards":
            forge.replace_tip(tiny, shards=[tip["shards"][0] | {"key": key}])
        else:
            forge.replace_tip(tiny, **{field: tip[field] | {"key": key}})
        with pytest.raises(MalformedObject, match=r"LATEST: \w+\.key: " if "LATEST" in field else field):
            tiny.log.tip()


@pytest.mark.parametrize(
    ("prefix", "name", "message"),
    [
        ("anchors/1", "..", r"anchor\.files\.0\.key: .*is not a relative key"),
        ("anchors/1", ".", r"anchor\.files\.0\.key: .*is not a relative key"),
        ("anchors/1", "", r"anchor\.files\.0\.key: .*is not a relative key"),
        ("anchors/1", "a b", r"anchor\.files\.0\.key: .*is not a relative key"),
        ("anchors/1", "a\\..\\b", r"anchor\.files\.0\.key: .*is not a relative key"),
        ("anchors/../..", "a", r"anchor\.prefix: .*is not a relative key"),
        ("/etc", "passwd", r"anchor\.prefix: .*is not a relative key"),
        ("", "etc", r"anchor\.prefix: .*is not a relative key"),
        ("anchors/1", "deeper/a", "is not a file directly below"),
    ],
)
def test_71_an_anchor_that_leads_out_of_its_prefix_or_the_run_is_refused(
    tiny: tiny_log.TinyLog, prefix: str, name: str, message: str
) -> None:
    file = {"key": f"{prefix}/{name}", "size": 1, "sha256": "0" * 64}
    forge.replace_tip(tiny, anchor={"prefix": prefix, "files": [file]})
    with pytest.raises(MalformedObject, match=message):
        tiny.log.tip()
    sound = file | {"key": "anchors/1/a"}
    forge.replace_tip(tiny, anchor={"prefix": "anchors/1", "files": [sound | {"size": (1 << 40) + 1}]})
    with pytest.raises(MalformedObject, match=r"anchor\.files\.0\.size: .*less than or equal"):
        tiny.log.tip()
    forge.replace_tip(tiny, anchor={"prefix": "anchors/1", "files": [sound]})
    assert tiny.log.tip().anchor is not None, "the anchor that the attacks start from is sound"


FIELDS: dict[str, dict[str, Any]] = {
    "72 an unknown format": {"format": "vllm-delta-sync/2"},
    "73 an unknown field": {"surprise": 1},
    "74 a version that is a string": {"version": "3"},
    "75 a version that is a truth value": {"version": True},
    "76 a negative version": {"version": -1},
    "77 an unknown kind": {"kind": "fold"},
    "78 a delta without a parent": {"parent": None},
    "79 a base that is not version 0": {"kind": "base", "parent": None},
    "80 a size that is too large to fetch": {"table": {"start": 300, "size": 1 << 40, "sha256": "0" * 64}},
    "81 a digest that is none": {"state_root": "xyz"},
    "82 metadata that is no map of strings": {"metadata": {"a": 1}},
    "83 metadata beyond 16 KiB": {"metadata": {"a": "x" * (16 << 10)}},
    "84 totals that do not add up": {"totals": {"tensors": 1, "elements": 1, "changed": 0, "bytes": 1}},
    "85 five thousand shards": {"shards": [{"key": "a", "size": 9, "sha256": "0" * 64, "data_start": 8}] * 5000},
    "86 a delta that names a base": {"base": {"model": "x", "revision": None}},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_lying_manifest_is_refused_by_its_key(tiny: tiny_log.TinyLog, name: str) -> None:
    forge.replace_tip(tiny, **FIELDS[name])
    with pytest.raises(MalformedObject, match=r"manifest\.json: "):
        tiny.log.tip()


TEXTS = {
    "87 NaN in JSON": (b'"created":', b'"created":NaN,"x":'),
    "88 Infinity in JSON": (b'"created":', b'"created":Infinity,"x":'),
    "89 a float beyond all floats": (b'"created":', b'"created":1e999,"x":'),
    "90 the same field twice": (b'"kind":', b'"kind":"base","kind":'),
    "91 bytes that are not UTF-8": (b'"kind":', b'"\xff":0,"kind":'),
    "92 a nest of brackets": (b'"kind":', b'"x":' + b"[" * 100_000 + b',"kind":'),
    "93 a number of a hundred thousand digits": (b'"version":', b'"version":' + b"9" * 100_000 + b',"x":'),
    "94 more than a mebibyte": (b'"kind":', b" " * (1 << 20) + b'"kind":'),
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_json_is_refused(tiny: tiny_log.TinyLog, name: str) -> None:
    old, new = TEXTS[name]
    data = tiny.object(tiny.log.latest().manifest.key).read_bytes()
    assert data.count(old) == 1
    forge.replace_tip_bytes(tiny, data.replace(old, new))
    with pytest.raises(MalformedObject):
        tiny.log.tip()


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[1]", b"{", b"\0" * 100, b"x" * (2 << 20)])
def test_95_a_latest_that_is_none_is_refused(tiny: tiny_log.TinyLog, data: bytes) -> None:
    (tiny.run_dir / "LATEST").write_bytes(data)
    with pytest.raises(MalformedObject, match="LATEST"):
        tiny.log.latest()


@pytest.mark.parametrize(
    "data", [b"", b"../" + b"a" * 29, b"A" * 32, b"a" * 33, b"a" * 32 + b"\n", b"a" * 1000, b"\xff" * 32]
)
def test_96_a_run_id_that_is_none_is_refused(tiny: tiny_log.TinyLog, data: bytes) -> None:
    (tiny.bucket / "RUN").write_bytes(data)
    with pytest.raises(MalformedObject):
        DeltaLog.open(str(tiny.bucket))


def test_97_a_foreign_run_is_refused(tiny: tiny_log.TinyLog) -> None:
    """A pointer, or a manifest, copied from another run of the same bucket."""
    other = LogWriter.create(str(tiny.bucket), tiny_log.lanes_of(tiny.models[0]), base=BaseRef(model="x"))
    run, mine = other.log.run, DeltaLog.open(str(tiny.bucket), tiny.writer.log.run)
    shutil.copy(tiny.bucket / run / "LATEST", tiny.run_dir / "LATEST")
    with pytest.raises(VersionGap, match=f"of run {run}"):
        mine.latest()
    forged = other.pointer.model_copy(update={"run": mine.run})
    (tiny.run_dir / "LATEST").write_bytes(forged.to_bytes())
    shutil.copy(tiny.bucket / run / forged.manifest.key, tiny.object(forged.manifest.key))
    with pytest.raises(VersionGap, match=f"of run {run}"):
        mine.tip()


def test_98_a_delta_whose_parent_is_missing_is_refused_by_key(tiny: tiny_log.TinyLog) -> None:
    """n+2 without n+1."""
    parent = tiny.log.tip().parent
    assert parent is not None
    tiny.object(parent.key).unlink()
    with pytest.raises(NotFound, match=parent.key):
        tiny.log.manifests()


def test_99_a_parent_that_skips_a_version_is_refused(tiny: tiny_log.TinyLog) -> None:
    second = tiny.log.manifests()[2]
    assert second.parent is not None
    forge.replace_tip(tiny, parent=second.parent.model_dump())
    with pytest.raises(VersionGap, match="contiguous"):
        tiny.log.manifests()


def test_100_a_parent_with_another_digest_is_refused_by_key(tiny: tiny_log.TinyLog) -> None:
    parent = tiny.log.tip().parent
    assert parent is not None
    path = tiny.object(parent.key)
    path.write_bytes(forge.dump(json.loads(path.read_bytes()) | {"step": 21}))
    with pytest.raises(DigestMismatch, match=parent.key):
        tiny.log.manifests()


def test_101_a_cycle_ends_at_the_first_version_that_does_not_fall(tiny: tiny_log.TinyLog) -> None:
    """A digest cycle cannot be made, so the closest to it: a parent of the same or a higher version, that exists."""
    forge.replace_tip(tiny, version=2)
    latest = json.loads((tiny.run_dir / "LATEST").read_bytes())
    (tiny.run_dir / "LATEST").write_bytes(forge.dump(latest | {"version": 2}))
    with pytest.raises(VersionGap, match="contiguous"):
        tiny.log.manifests()


def test_102_a_chain_of_absurd_length_is_refused_before_it_is_walked(tiny: tiny_log.TinyLog) -> None:
    forge.replace_tip(tiny, version=10**17)
    latest = json.loads((tiny.run_dir / "LATEST").read_bytes())
    (tiny.run_dir / "LATEST").write_bytes(forge.dump(latest | {"version": 10**17}))
    with pytest.raises(VersionGap, match="at most"):
        tiny.log.manifests()


def test_103_a_latest_that_states_another_version_than_its_manifest_is_refused(tiny: tiny_log.TinyLog) -> None:
    pointer: LatestPointer = tiny.log.latest()
    (tiny.run_dir / "LATEST").write_bytes(pointer.model_copy(update={"version": 7}).to_bytes())
    for follow in (tiny.log.tip, lambda: LogWriter.attach(tiny.log)):
        with pytest.raises(VersionGap, match="LATEST says version 7"):
            follow()
    for goal in (7, 2):  # where it says to go, and where a pin may say
        with pytest.raises(VersionGap, match=r"version 3 where 7 must be.*LATEST must name the version"):
            Route(tiny.log).next_hop(tiny.log.latest(), pointer.base, 0, goal)


def other_spec(old: TensorSpec, change: str) -> TensorSpec:
    return {
        "unknown tensor": TensorSpec("zzz." + old.name, old.dtype, old.shape),
        "wrong shape": TensorSpec(old.name, old.dtype, (old.numel,)),
        "wrong dtype": TensorSpec(old.name, "F16", old.shape),
    }[change]


@pytest.mark.parametrize("change", ["unknown tensor", "wrong shape", "wrong dtype"])
def test_104_a_tensor_that_is_not_the_bases_is_refused_by_its_name(tiny: tiny_log.TinyLog, change: str) -> None:
    table = tiny.log.table(tiny.log.tip())
    tensors = list(table.tensors)
    at = tensors.index(tiny_log.SPECS[0])
    spec = tensors[at] = other_spec(tensors[at], change)
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].name)
    columns = VersionTable(tuple(tensors[i] for i in order), table.hashes[order], ())
    rows = sorted(table.blocks, key=lambda row: (order.index(row.tensor), row.start))
    blocks = [(order.index(row.tensor), tensors[row.tensor], row) for row in rows]
    forged = VersionTable(columns.tensors, columns.hashes, tuple(_moved(*block) for block in blocks))
    forge.replace_tip_table(tiny, forged.to_bytes())
    with pytest.raises(MalformedObject, match=f"tensor '{spec.name}'"):
        tiny.log.materialize(3, tiny.base)


def _moved(tensor: int, spec: TensorSpec, row: Any) -> Any:
    return dataclasses.replace(row, tensor=tensor, spec=spec)


def test_105_a_block_outside_its_shard_is_refused(tiny: tiny_log.TinyLog) -> None:
    table = tiny.log.table(tiny.log.tip())
    last = max(range(len(table.blocks)), key=lambda row: table.blocks[row].offset)
    rows = list(table.blocks)
    rows[last] = dataclasses.replace(rows[last], offset=rows[last].offset + 1)
    forge.replace_tip_table(tiny, VersionTable(table.tensors, table.hashes, tuple(rows)).to_bytes())
    with pytest.raises(MalformedObject, match="reaches beyond"):
        tiny.log.table(tiny.log.tip())


def test_105_a_table_that_does_not_end_where_the_blocks_begin_is_refused(tiny: tiny_log.TinyLog) -> None:
    """Whoever reads ranges would see other blocks than whoever reads the whole shard."""
    tip = tiny.log.tip()
    for by in (-1, 1):
        forge.replace_tip(tiny, shards=[tip.shards[0].model_dump() | {"data_start": tip.shards[0].data_start + by}])
        with pytest.raises(MalformedObject, match="the table ends at"):
            tiny.log.tip()


def test_106_a_table_with_other_totals_than_its_manifest_is_refused(tiny: tiny_log.TinyLog) -> None:
    totals = tiny.log.tip().totals
    forge.replace_tip(tiny, totals=totals.model_dump() | {"changed": totals.changed + 1})
    with pytest.raises(MalformedObject, match="elements change"):
        tiny.log.table(tiny.log.tip())


def test_107_a_tensor_listed_without_a_block_is_refused(tiny: tiny_log.TinyLog) -> None:
    tip, table = tiny.log.tip(), tiny.log.table(tiny.log.tip())
    idle = VersionTable(
        (*table.tensors, TensorSpec("zz", "BF16", (1,))), np.vstack((table.hashes, table.hashes[:1])), table.blocks
    )
    forge.replace_tip_table(tiny, idle.to_bytes())
    assert tiny.log.tip().totals.changed == tip.totals.changed
    with pytest.raises(MalformedObject, match="'zz' is listed but has no block"):
        tiny.log.table(tiny.log.tip())


def test_108_a_shard_that_no_block_refers_to_is_verified_too(tiny: tiny_log.TinyLog) -> None:
    tip = tiny.log.tip()
    idle = {"key": "versions/idle.safetensors", "size": 9, "sha256": "0" * 64, "data_start": 8}
    totals = tip.totals.model_dump() | {"bytes": tip.totals.bytes + 9}
    forge.replace_tip(tiny, shards=[*(shard.model_dump() for shard in tip.shards), idle], totals=totals)
    assert [(fault.version, fault.cause) for fault in checks.verify(tiny.log).faults] == [(3, "not_found")]
    tiny.object("versions/idle.safetensors").write_bytes(b"123456789")
    assert [(fault.version, fault.cause) for fault in checks.verify(tiny.log).faults] == [(3, "digest")]


def test_116_a_latest_of_absurd_height_is_refused_before_anything_is_planned(tiny: tiny_log.TinyLog) -> None:
    """An edge for every version up to it would take all memory."""
    (tiny.run_dir / "LATEST").write_bytes(tiny.log.latest().model_copy(update={"version": 10**9}).to_bytes())
    with pytest.raises(VersionGap, match=r"LATEST says version 1000000000, .* planned over"):
        tiny.log.catalog()
    with pytest.raises(VersionGap, match="planned over"):
        Replica(tiny.log, tiny.base).follow(tiny.log.latest())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("a", 1 << 41)], r"anchor\.files\.0\.size"),
        ([("a", 1), ("a", 1)], "two of its files have the same key"),
    ],
)
def test_117_an_anchor_of_absurd_or_repeated_files_is_refused(
    tiny: tiny_log.TinyLog, files: list[tuple[str, int]], message: str
) -> None:
    stated = [{"key": f"anchors/1/{name}", "size": size, "sha256": "0" * 64} for name, size in files]
    forge.replace_tip(tiny, anchor={"prefix": "anchors/1", "files": stated})
    with pytest.raises(MalformedObject, match=message):
        tiny.log.tip()


def test_118_an_anchor_that_does_not_cost_what_it_says_is_refused(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_anchor(tiny, 2)
    catalog = json.loads(tiny.log.catalog().to_bytes())
    catalog["anchors"][0]["bytes"] -= 1
    with pytest.raises(MalformedObject, match=r"anchors\.0: .*but the files have"):
        Catalog.from_bytes(forge.dump(catalog), "the catalog")


def test_every_refusal_is_typed_and_names_where_it_happened(tiny: tiny_log.TinyLog) -> None:
    forge.replace_tip(tiny, kind="fold")
    with pytest.raises(DeltaSyncError, match=r"file:///.*/versions/0+3/[0-9a-f]{32}\.manifest\.json: kind: "):
        tiny.log.materialize(3, tiny.base)
