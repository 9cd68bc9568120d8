"""Hugging Face checkpoints as bits: reading them lazily from mapped files, and writing new ones.

Does not convert elements and does not know torch.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vllm_delta_sync.errors import MalformedObject, NotFound
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import canonical_json, container, dtypes
from vllm_delta_sync.wire.tensors import TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
_MAX_INDEX_BYTES = 64 << 20


class Checkpoint(Mapping[str, tuple[TensorSpec, Bits]]):
    """Name → (spec, bits uW[numel], read-only) of mapped safetensors files; a page is read when it is touched."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[TensorSpec, memoryview]] = {}

    def add_file(self, path: Path) -> None:
        """Map one file; raises MalformedObject when it is damaged or repeats a tensor, NotFound when it is missing."""
        try:
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # the view keeps the map open
        except FileNotFoundError:
            raise NotFound(f"{path} does not exist") from None
        except ValueError:
            raise MalformedObject(f"{path} is empty") from None
        header = container.parse_file(data, str(path), max_header=container.CHECKPOINT_HEADER_BYTES)
        for name, entry in header.entries.items():
            if name in self._found:
                raise MalformedObject(f"{path}: tensor {name!r} is in another file of the checkpoint too")
            self._found[name] = (TensorSpec(name, entry.dtype, entry.shape), data[entry.start : entry.end])

    def spec(self, name: str) -> TensorSpec:
        """The spec of a tensor, without touching its elements; raises KeyError."""
        return self._found[name][0]

    def __getitem__(self, name: str) -> tuple[TensorSpec, Bits]:
        spec, data = self._found[name]
        bits = np.frombuffer(data, dtypes.by_name(spec.dtype).bits)
        # A file may begin a tensor at any byte; native code wants whole elements aligned, so such a tensor is copied.
        return spec, np.require(bits, requirements="A")

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Map the checkpoint in a directory: model.safetensors, or the files that model.safetensors.index.json names.

    Raises:
        NotFound: neither file exists, or one that the index names does not.
        MalformedObject: a header, or the index, is damaged or lies about the files.
    """
    root, checkpoint = Path(directory), Checkpoint()
    if (root / SINGLE).is_file():
        checkpoint.add_file(root / SINGLE)
        return checkpoint
    if not (root / INDEX).is_file():
        raise NotFound(f"{root} holds neither {SINGLE} nor {INDEX}; give the directory of a safetensors checkpoint")
    what = str(root / INDEX)
    with (root / INDEX).open("rb") as file:
        index = file.read(_MAX_INDEX_BYTES + 1)
    weight_map = canonical_json.parse(index, what, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise MalformedObject(f"{what}: weight_map must map tensor names to file names")
    for name in sorted(set(weight_map.values())):
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise MalformedObject(f"{what}: {name[:80]!r} is not the name of a file beside the index")
        checkpoint.add_file(root / name)
    if set(weight_map) != set(checkpoint):
        odd = min(set(weight_map) ^ set(checkpoint))
        raise MalformedObject(f"{what}: tensor {odd[:80]!r} is in the index or in the files, but not in both")
    return checkpoint


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Iterable[tuple[TensorSpec, Bits]],
    extra_files: Iterable[Path] = (),
    *,
    file_bytes: int = FILE_BYTES,
) -> list[Path]:
    """Write tensors (spec, bits uW[numel]) as a checkpoint that transformers and vLLM load; `extra_files` go beside it.

    Files of at most `file_bytes` of data each (a larger tensor has its own), with an index when there are several.
    Tensors are not copied in memory. Returns the paths written, durable.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    given = dict(tensors)
    files = plan_files(given, file_bytes)
    written = []
    for name, specs in files.items():
        write_file(root / name, specs, given.__getitem__)
        written.append(root / name)
    if len(files) > 1:
        with _durable(root / INDEX) as file:
            file.write(index_of(files))
        written.append(root / INDEX)
    for source in extra_files:
        with source.open("rb") as reader, _durable(root / source.name) as file:
            shutil.copyfileobj(reader, file)
        written.append(root / source.name)
    sync_directory(root)
    return written


def plan_files(specs: Iterable[TensorSpec], file_bytes: int = FILE_BYTES) -> dict[str, list[TensorSpec]]:
    """The files of a checkpoint and the tensors in each: at most `file_bytes` of data, or one larger tensor."""
    groups: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not groups or spec.nbytes > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(spec)
        room -= spec.nbytes
    if len(groups) < 2:
        return {SINGLE: groups[0] if groups else []}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def write_file(path: Path, specs: Iterable[TensorSpec], read: Callable[[TensorSpec], Bits]) -> None:
    """Write one file of a checkpoint, durably; `read` is asked for the bits uW[numel] of one tensor at a time."""
    # Widest first, so that every tensor begins at a multiple of its width.
    ordered = sorted(specs, key=lambda spec: (-spec.width, spec.name))
    with _durable(path) as file:
        file.write(container.layout([(spec.name, spec.dtype, spec.shape) for spec in ordered], {"format": "pt"}))
        for spec in ordered:
            bits = read(spec)
            assert bits.size == spec.numel and bits.itemsize == spec.width, f"{spec}: {bits.size} elements"
            if bits.size:
                file.write(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)


def index_of(files: Mapping[str, Iterable[TensorSpec]]) -> bytes:
    """The index of a checkpoint of several files."""
    weight_map = {spec.name: name for name, specs in files.items() for spec in specs}
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    return canonical_json.dump({"metadata": {"total_size": total}, "weight_map": weight_map})


def config_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files that a loadable checkpoint has beside its weights: config, tokenizer, licence, and the like."""
    suffixes = {".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken"}
    found = sorted(path for path in Path(directory).iterdir() if path.is_file() and not path.name.startswith("."))
    indexes = (".safetensors.index.json", ".bin.index.json")
    wanted = [path for path in found if path.suffix in suffixes or path.name == "LICENSE"]
    return [path for path in wanted if not path.name.endswith(indexes)]


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
