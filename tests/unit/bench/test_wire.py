"""The sizes that are reported are those of what is published, and the entropies those of the books."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_delta_sync import Publisher
from vllm_delta_sync.bench import codings, entropy, peers, wire
from vllm_delta_sync.bench.step import Part, parts, read
from vllm_delta_sync.cli.bench import app
from vllm_delta_sync.wire import codec_rules
from vllm_delta_sync.wire.checkpoint import open_checkpoint, write_checkpoint
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.tensors import TensorSpec

Pair = tuple[Path, Path]


def weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 64, generator=random).bfloat16(),
        "norm": torch.randn(64, generator=random),
        "up": torch.randn(64, 128, generator=random).bfloat16(),
        "untouched": torch.ones(8, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A little model, and the same a step later: 3 of 4 tensors change, one of them fp32."""
    root = tmp_path_factory.mktemp("pair")
    old, new = weights(0), weights(0)
    for name, every in (("embed", 97), ("norm", 9), ("up", 3)):
        new[name].view(-1)[::every] *= 1.01
    for side, tensors in (("old", old), ("new", new)):
        (root / side).mkdir()
        save_file(tensors, root / side / "model.safetensors")
    return root / "old", root / "new"


@pytest.fixture(scope="module")
def found(pair: Pair) -> wire.WireSizes:
    return wire.measure(*pair)


def test_the_adaptive_row_is_what_a_publisher_uploads(pair: Pair, found: wire.WireSizes, tmp_path: Path) -> None:
    with Publisher.open(tmp_path / "bucket", base=pair[0], folds=None, anchors=None, ctx=True) as publisher:
        published = publisher.publish(peers.as_tensors(read(*pair)[1])).outcome.result(30)
    uploaded = [path for path in (tmp_path / "bucket").rglob("*/versions/*1/*") if path.is_file()]
    sizes = {row.name: row.bytes for row in found.rows}
    assert sizes["adaptive"] == published.bytes
    assert sizes["adaptive"] == sum(path.stat().st_size for path in uploaded if path.suffix == ".safetensors")
    manifest = next(path for path in uploaded if path.name.endswith(".manifest.json"))
    assert abs(found.manifest_bytes - manifest.stat().st_size) < 64  # the times in it and the path of the base differ


def test_every_codec_of_the_registry_has_a_row_and_none_of_them_beats_the_choice_by_more_than_the_table(
    found: wire.WireSizes,
) -> None:
    assert codings.CODINGS.keys() == {*codec_rules.NAMES.values(), "adaptive"}
    sizes = {row.name: row.bytes for row in found.rows}
    least = min(size for name, size in sizes.items() if name in codec_rules.NAMES.values() and size)
    assert sizes["adaptive"] is not None and sizes["adaptive"] <= least + 64


def test_a_coding_writes_only_its_own_codec(pair: Pair) -> None:
    before, after = read(*pair)
    for name in ("gap-abs", "dense"):
        blocks = [block for update in codings.updates(before, after, codings.CODINGS[name]) for block in update.blocks]
        assert {codec_rules.NAMES[encoded.codec] for _, _, encoded in blocks} == {name}
    for name, of_fp32 in (("gap", "gap-abs"), ("ctx", "ctx")):  # gaps with steps are of half floats only
        found = {update.spec.name: update.blocks for update in codings.updates(before, after, codings.CODINGS[name])}
        codecs = {tensor: codec_rules.NAMES[blocks[0][2].codec] for tensor, blocks in found.items()}
        assert codecs == {"embed": name, "norm": of_fp32, "up": name}


def test_the_bytes_of_a_payload_grow_with_the_blocks(pair: Pair) -> None:
    before, after = read(*pair)
    found, ends = codings.updates(before, after), Ends("0" * 32, 0, 1)
    stored = sum(encoded.stored for update in found[1:] for _, _, encoded in update.blocks)
    assert codings.payload_bytes(ends, found) > codings.payload_bytes(ends, found[1:]) > stored


def test_rows_of_peers(pair: Pair, found: wire.WireSizes) -> None:
    before, after = read(*pair)
    rows = {row.name: row for row in found.rows}
    changed = {name: int((bits != after[name][1]).sum()) for name, (_, bits) in before.items()}
    assert found.changed == sum(changed.values()) and changed["untouched"] == 0
    assert rows["int32_bf16"].bytes == 6 * (changed["embed"] + changed["up"]) + 8 * changed["norm"]
    assert rows["xor_zstd"].bytes == peers.xor_zstd_bytes(before, after) > 0
    assert found.density == found.changed / sum(bits.size for _, bits in before.values())


def test_json_of_wire(pair: Pair) -> None:
    done = CliRunner().invoke(app, ["wire", *map(str, pair), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.keys() == {"changed", "density", "manifest_bytes", "rows", "dearer_tensors", "entropy"}
    assert found["entropy"].keys() == {"iid", "conditional"}
    assert all(row.keys() == {"name", "bytes", "bytes_per_change"} for row in found["rows"])
    names = {row["name"] for row in found["rows"]}
    assert names >= {"ctx", "gap", "dense", "adaptive", "arc_v3", "xor_zstd", "int32_bf16"}


def test_a_tensor_that_is_dearer_than_by_gap_or_whole_is_counted_and_a_publisher_makes_none(
    pair: Pair, found: wire.WireSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found.dearer_tensors["adaptive"] == 0
    worse = {**codings.CODINGS, "adaptive": codings.CODINGS["gap-abs"]}
    monkeypatch.setattr(wire, "CODINGS", worse)
    assert wire.measure(*pair).dearer_tensors["adaptive"] == 2  # embed and up; norm is fp32, and so coded by all


def test_a_checkpoint_may_be_in_several_files(pair: Pair, found: wire.WireSizes, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dict(open_checkpoint(pair[1])).values(), file_bytes=1 << 10)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert ours(wire.measure(pair[0], tmp_path)) == ours(found)


def ours(sizes: wire.WireSizes) -> list[wire.Row]:
    """Without what a package may give up when it takes too long."""
    return [row for row in sizes.rows if row.name != "arc_v3"]


def test_a_missing_package_is_told_in_its_row(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fireworks_delta_compression", None)  # importing it raises ImportError
    assert "pip install fireworks-delta-compression" in CliRunner().invoke(app, ["wire", *map(str, pair)]).stdout


def part(dtype: str, old: list[int], new: list[int], bits: str) -> Part:
    return Part(TensorSpec("t", dtype, (len(old),)), 0, np.array(old, bits), np.array(new, bits))


def test_entropy_of_a_fair_choice() -> None:
    # 2 of 4 elements change: 4 bits for which, and of two steps that are as likely one bit each; over 2 changes.
    found = entropy.measure([part("BF16", [0x3F80] * 4, [0x3F80, 0x3F81, 0x3F80, 0x3F82], "u2")])
    assert found.iid == found.conditional == pytest.approx((4 + 2) / 2 / 8)


def test_entropy_is_less_where_the_exponent_tells() -> None:
    # All of exponent 0x7E change, none of 0x7F: knowing it, nothing is left to say.
    before, after = [0x3F00, 0x3F01, 0x3F80, 0x3F81], [0x3F01, 0x3F02, 0x3F80, 0x3F81]
    found = entropy.measure([part("BF16", before, after, "u2")])
    assert found.iid == pytest.approx(4 / 2 / 8)  # 4 bits for which; both steps are +1
    assert found.conditional == 0


def test_a_step_away_from_zero_is_one_symbol_for_both_signs() -> None:
    # Of either sign one element grows: as values one step up and one down, as magnitudes twice the same.
    found = entropy.measure([part("BF16", [0x3F80, 0xBF80], [0x3F81, 0xBF81], "u2")])
    assert found.iid == pytest.approx(1 / 8)
    assert found.conditional == 0


def test_the_exponent_tells_the_step() -> None:
    # Everything changes; what is of exponent 0x7E by one step, what is of 0x7F by two.
    found = entropy.measure([part("BF16", [0x3F00, 0x3F01, 0x3F80, 0x3F81], [0x3F01, 0x3F02, 0x3F82, 0x3F83], "u2")])
    assert found.iid == pytest.approx(1 / 8)
    assert found.conditional == pytest.approx(0)


def test_each_dtype_has_distributions_of_its_own() -> None:
    halves = part("BF16", [0x3F80] * 4, [0x3F80, 0x3F81, 0x3F80, 0x3F82], "u2")
    bytes_ = replace(part("U8", [7] * 4, [7, 9, 7, 8], "u1"))
    assert entropy.measure([halves, bytes_]).iid == pytest.approx(entropy.measure([halves]).iid)
    assert entropy.measure([bytes_]) == entropy.measure([halves])


def test_entropy_of_an_update_of_which_one_dtype_does_not_change(pair: Pair) -> None:
    blocks = [block for block in parts(*read(*pair)) if block.spec.name in ("up", "norm")]
    still = [replace(block, new=block.old) if block.spec.name == "norm" else block for block in blocks]
    alone = [block for block in blocks if block.spec.name == "up"]
    assert entropy.measure(still) == entropy.measure(alone)


@pytest.mark.parametrize(("dtype", "bits", "values"), [("F16", "u2", "f2"), ("F32", "u4", "f4"), ("F64", "u8", "f8")])
def test_floats_are_ordered_as_their_values(dtype: str, bits: str, values: str) -> None:
    floats = np.array([-math.inf, -1.5, -1.0, -0.0, 0.0, 1.0, 1.5, math.inf], values)
    ranks = entropy.ordered(dtype, floats.view(bits)).view(bits.replace("u", "i"))
    assert (np.diff(ranks) > 0).all()
