"""Speeds are reported in full, and what is timed gives what it should."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_delta_sync.bench import encode, peers
from vllm_delta_sync.bench.codings import CODINGS
from vllm_delta_sync.bench.step import read
from vllm_delta_sync.cli.bench import app

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of 2.1 M elements, in one tensor of which every 50th changes; in two files, as large ones are."""
    root = tmp_path_factory.mktemp("pair")
    for side in ("old", "new"):
        folder = root / side
        folder.mkdir()
        weight = torch.linspace(-1, 1, 1 << 21).bfloat16().view(2048, 1024)
        if side == "new":
            weight.view(-1)[::50] += 0.1
        save_file({"weight": weight}, folder / "model-00001-of-00002.safetensors")
        save_file({"norm": torch.ones(1024).bfloat16()}, folder / "model-00002-of-00002.safetensors")
        files = {"weight": "model-00001-of-00002.safetensors", "norm": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return root / "old", root / "new"


@pytest.mark.parametrize("threads", [1, 2])
def test_json_of_encode(pair: Pair, threads: int) -> None:
    done = CliRunner().invoke(app, ["encode", *map(str, pair), "--json", "--rounds", "1", "--threads", str(threads)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    codecs = {"encode_gb_s", "decode_gb_s"}
    assert found.keys() == {"diff_gb_s", "arc_v3", "torch_nonzero_gb_s", "read_gb_s", "threads"} | codecs
    assert all(found[which].keys() == CODINGS.keys() for which in codecs)
    assert found["threads"] == threads
    assert min(found["diff_gb_s"], found["torch_nonzero_gb_s"], *found["encode_gb_s"].values()) > 0


@pytest.mark.parametrize("coding", CODINGS)
def test_what_is_timed_decodes_to_the_new_values(pair: Pair, coding: str) -> None:
    before, after = read(*pair)
    for row, stored, part in encode.encoded(before, after, CODINGS[coding]):
        changed = np.flatnonzero(part.old != part.new) if row.codec else slice(None)
        assert np.array_equal(encode.decode(row, stored, part), part.new[changed])


def test_what_torch_finds_is_the_difference(pair: Pair) -> None:
    before, after = read(*pair)
    found = peers.NonzeroGather(before, after).encode()
    assert [index.numel() for index, _ in found] == [int((before[name][1] != after[name][1]).sum()) for name in after]


@pytest.mark.skipif(
    peers.arc_package(patient=False) is None,
    reason="arc_v3 is a peer's package, which the bench extra brings: fireworks-delta-compression",
)
def test_arc_gives_back_the_new_model(pair: Pair) -> None:
    before, after = read(*pair)
    arc = peers.ArcV3(peers.arc_package(patient=False), before, after)
    decoded = arc.decode(arc.encode())
    assert all(torch.equal(decoded[name], tensor) for name, tensor in peers.as_tensors(after).items())
    assert arc.bytes() > 0
