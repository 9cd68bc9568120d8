"""Fetching takes the memory of one shard, however large the version is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_delta_sync.log import LogWriter, TensorUpdate
from vllm_delta_sync.wire.codec_rules import DENSE
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.manifest import BaseRef
from vllm_delta_sync.wire.tensors import TensorSpec

MIB = 1 << 20
SHARD = 40 * MIB
SHARDS = 3


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One version of dense blocks of 1 MiB; its state hashes are invented."""
    path = tmp_path_factory.mktemp("large")
    rng, lanes = np.random.default_rng(0), np.ones(4, np.uint32)
    specs = [TensorSpec(f"t{number:03}", "BF16", (MIB // 2,)) for number in range(SHARDS * SHARD // MIB - SHARDS)]
    begun = LogWriter.create(str(path), dict.fromkeys(specs, lanes), base=BaseRef(model="none"))
    writer = LogWriter(begun.log, begun.pointer, begun.tip, shard_bytes=SHARD)
    blocks = (EncodedBlock(DENSE, MIB // 2, b"", rng.bytes(MIB), (0, MIB)) for _ in specs)
    updates = [TensorUpdate(spec, lanes, [(0, MIB // 2, block)]) for spec, block in zip(specs, blocks, strict=True)]
    assert len(writer.commit(updates, state_root="0" * 64).shards) == SHARDS
    return path


@pytest.mark.parametrize("cached", [False, True])
def test_a_reader_grows_by_one_shard(bucket: Path, tmp_path: Path, cached: bool) -> None:
    script = str(Path(__file__).parent / "fetch_peak.py")
    cache = str(tmp_path / "cache") if cached else ""
    command = [sys.executable, script, str(bucket), cache]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert int(found.stdout) < SHARD + 24 * MIB  # what is decoded, and what allocators keep
