"""Checkpoints are read and written as bits, as the safetensors library itself reads and writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from vllm_delta_sync.errors import MalformedObject, NotFound
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import dtypes
from vllm_delta_sync.wire.checkpoint import config_files, open_checkpoint, write_checkpoint
from vllm_delta_sync.wire.tensors import TensorSpec


def tensors(count: int = 5) -> list[tuple[TensorSpec, Bits]]:
    rng = np.random.default_rng(7)
    found = []
    for index in range(count):
        dtype = dtypes.by_code(index % 12 + 1)
        spec = TensorSpec(f"layer.{index}", dtype.name, [(3, 5), (), (0, 2), (7,)][index % 4])
        found.append((spec, rng.integers(0, 2, spec.nbytes, np.uint8).view(dtype.bits)))
    return found


def assert_holds(directory: Path, expected: list[tuple[TensorSpec, Bits]]) -> None:
    found = open_checkpoint(directory)
    assert set(found) == {spec.name for spec, _ in expected}
    for spec, bits in expected:
        assert found.spec(spec.name) == spec
        np.testing.assert_array_equal(found[spec.name][1], bits)


def test_one_file_is_read_back_and_by_the_library(tmp_path: Path) -> None:
    expected = tensors(12)
    assert [path.name for path in write_checkpoint(tmp_path, expected)] == ["model.safetensors"]
    assert_holds(tmp_path, expected)
    parsed = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    for spec, bits in expected:
        assert parsed[spec.name]["dtype"] == spec.dtype
        assert tuple(parsed[spec.name]["shape"]) == spec.shape
        assert bytes(parsed[spec.name]["data"]) == bits.tobytes()


def test_a_file_that_the_library_wrote_is_read(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(True), "c": np.arange(3, dtype=np.int64)}
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert found["a"][0] == TensorSpec("a", "F32", (2, 3))
    for name, value in values.items():
        assert found[name][1].tobytes() == value.tobytes()


def test_a_large_checkpoint_is_cut_into_files_with_an_index(tmp_path: Path) -> None:
    expected = tensors(12)
    files = write_checkpoint(tmp_path, expected, file_bytes=40)
    assert len(files) > 3
    assert files[-1].name == "model.safetensors.index.json"
    assert_holds(tmp_path, expected)
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec, _ in expected)


def test_extra_files_are_copied_and_weights_are_not_among_them(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, tensors(), file_bytes=20)
    for name in ("config.json", "tokenizer.model", "LICENSE", "pytorch_model.bin", ".hidden.json"):
        (source / name).write_text(name)
    extra = config_files(source)
    assert [path.name for path in extra] == ["LICENSE", "config.json", "tokenizer.model"]
    write_checkpoint(out, tensors(), extra)
    assert (out / "tokenizer.model").read_text() == "tokenizer.model"


def test_the_directory_of_a_checkpoint_is_synced_after_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    monkeypatch.setattr(os, "fsync", record)
    write_checkpoint(tmp_path, tensors())
    assert synced == ["model.safetensors", tmp_path.name]


def test_bits_are_mapped_and_read_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors())
    bits = open_checkpoint(tmp_path)["layer.0"][1]
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = 1


def test_a_tensor_at_an_odd_byte_is_read_aligned(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "wide": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"\x01" + np.array([5, 6], "<u4").tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    bits = open_checkpoint(tmp_path)["wide"][1]
    assert bits.flags.aligned
    assert bits.tolist() == [5, 6]


def test_a_directory_without_a_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def index(tmp_path: Path, weight_map: object) -> Path:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_an_index_larger_than_memory_is_refused_by_its_size(tmp_path: Path) -> None:
    os.truncate(index(tmp_path, {}) / "model.safetensors.index.json", 1 << 40)
    with pytest.raises(MalformedObject, match=r"index\.json: .* are allowed"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="model-1"):
        open_checkpoint(index(tmp_path, {"a": "model-1.safetensors"}))


def test_an_index_that_disagrees_with_its_files_is_refused_by_the_tensor(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1), "b": np.zeros(1)}, tmp_path / "one.safetensors")
    with pytest.raises(MalformedObject, match="'b'"):
        open_checkpoint(index(tmp_path, {"a": "one.safetensors"}))
    save_file({"a": np.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(MalformedObject, match="'a' is in another file"):
        open_checkpoint(index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(MalformedObject, match="beside the index"):
        open_checkpoint(index(tmp_path, {"a": name}))
