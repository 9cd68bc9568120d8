"""Writing anchors: a version after the base as an ordinary checkpoint in its run, with the states of its tensors.

Does not decide when one is due: `schedule` does.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from vllm_delta_sync.errors import ConfigError, StateHashMismatch
from vllm_delta_sync.log import anchors, names
from vllm_delta_sync.log.base import Base
from vllm_delta_sync.log.discarding import discarding
from vllm_delta_sync.log.layers import End
from vllm_delta_sync.log.materialize import reconstructed
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.catalog import Anchor, Catalog
from vllm_delta_sync.wire.checkpoint import (
    FILE_BYTES,
    INDEX,
    config_files,
    index_of,
    open_checkpoint,
    plan_files,
    write_file,
)
from vllm_delta_sync.wire.keys import check_key
from vllm_delta_sync.wire.manifest import AnchorFile, AnchorRef, Found
from vllm_delta_sync.wire.state_hash import Lanes
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec


class Checkpoint(Protocol):
    """What an anchor is made of."""

    @property
    def lanes(self) -> Mapping[TensorSpec, Lanes]:
        """The state hash u32[4] of every published tensor."""
        ...

    @property
    def carried(self) -> Iterable[TensorSpec]:
        """Tensors that are in the checkpoint but not published."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Configuration, tokenizer and the like, by file name."""
        ...

    def read(self, spec: TensorSpec) -> Bits:
        """The bits uW[numel] of a tensor."""
        ...


def put(
    log: DeltaLog, end: End, checkpoint: Checkpoint, *, file_bytes: int = FILE_BYTES, progress: Progress = silent
) -> Anchor:
    """Write a checkpoint of a version and its states, durably; returns the anchor for a catalog.

    On this machine it takes the space of one file of the checkpoint, on disk, and of one tensor, in memory. What was
    written is proven: the state of each published tensor is hashed from the very bits that went into its file.

    Raises StateHashMismatch when that is not the state of the version, ConfigError when a file's name is none for a
    key, and what the store raises; what was put is removed then, as far as the store lets us.
    """
    attempt = uuid.uuid4().hex
    prefix, states = names.later_anchor(end.version, attempt), names.states(end.version, attempt)
    planned = plan_files(sorted([*checkpoint.lanes, *checkpoint.carried], key=lambda spec: spec.name), file_bytes)
    texts = dict(checkpoint.files)
    if len(planned) > 1:
        texts[INDEX] = index_of(planned)
    keys = {name: _key(prefix, name) for name in (*planned, *texts)}

    def read(spec: TensorSpec) -> Bits:
        bits = checkpoint.read(spec)
        if spec in checkpoint.lanes and not np.array_equal(state_hash.of_tensor(spec, bits), checkpoint.lanes[spec]):
            raise StateHashMismatch(f"tensor {spec.name!r} is not in the state of version {end.version}; no anchor")
        return bits

    with discarding(log.store, [*keys.values(), states]):
        if state_hash.state_root(checkpoint.lanes) != end.state_root:
            raise StateHashMismatch(f"the checkpoint is not in the state of version {end.version}; no anchor")
        found = []
        with tempfile.TemporaryDirectory(prefix="vllm-delta-sync-") as directory:
            for number, name in enumerate(keys):
                progress("writing the checkpoint", number, len(keys))
                path = Path(directory, name)
                if name in planned:
                    write_file(path, planned[name], read)
                else:
                    path.write_bytes(texts[name])
                found.append(anchors.write_file(log.store, keys[name], path))
                path.unlink()
        table = _put_states(log, states, checkpoint.lanes)
    progress("writing the checkpoint", len(keys), len(keys))
    return _anchor(end, prefix, found, table)


def write_anchor(
    log: DeltaLog, version: int, base: Base = None, *, file_bytes: int = FILE_BYTES, progress: Progress = silent
) -> Anchor:
    """Write the anchor of a version from the log alone, with configuration and tokenizer of what it begins with.

    No catalog names it yet. Tensors that the log does not publish are carried over.

    Args:
        base: directory of the base checkpoint, or None as for `materialize`.

    Raises ConfigError for version 0, whose anchor is written when its run begins, and what `materialize` and `put`
    raise.
    """
    if version == 0:
        raise ConfigError("version 0 is the base: its anchor is written when its run begins, or not at all")
    pointer, route = log.latest(), Route(log)
    with reconstructed(log, version, base, progress=progress) as (replica, beginning):
        manifest = route.manifest(ref := route.reference(pointer, version))
        directory = beginning if base is None or isinstance(base, Mapping) else Path(base)
        checkpoint = _Rebuilt(replica.lanes, replica.tensors, directory if isinstance(directory, Path) else None)
        end = End(version, manifest.state_root, ref)
        return put(log, end, checkpoint, file_bytes=file_bytes, progress=progress)


def with_anchors(catalog: Catalog, made: Iterable[Anchor]) -> Catalog:
    """The catalog with these anchors in it, each in the place of any of the same version."""
    found = {anchor.version: anchor for anchor in (*catalog.anchors, *made)}
    return catalog.model_copy(update={"anchors": tuple(found[version] for version in sorted(found))})


class _Rebuilt:
    """A model rebuilt from the log, and beside it the checkpoint that it began with."""

    def __init__(
        self, lanes: Mapping[TensorSpec, Lanes], tensors: Mapping[str, tuple[TensorSpec, Bits]], directory: Path | None
    ) -> None:
        self.lanes = lanes
        self._tensors = tensors
        self._beside = open_checkpoint(directory) if directory else {}
        self.carried = [spec for name, (spec, _) in self._beside.items() if name not in tensors]
        self.files = {path.name: path.read_bytes() for path in config_files(directory)} if directory else {}

    def read(self, spec: TensorSpec) -> Bits:
        found = self._tensors if spec.name in self._tensors else self._beside
        return found[spec.name][1]


def _key(prefix: str, name: str) -> str:
    try:
        return check_key(f"{prefix}/{name}")
    except ValueError as error:
        raise ConfigError(f"{name!r} cannot be part of an anchor: {error}; rename it or leave it out") from None


def _put_states(log: DeltaLog, key: str, lanes: Mapping[TensorSpec, Lanes]) -> Found:
    specs = tuple(sorted(lanes, key=lambda spec: spec.name.encode()))
    hashes = np.array([lanes[spec] for spec in specs], np.uint32).reshape(-1, 4)
    data = VersionTable(specs, hashes, ()).to_bytes()
    info = log.store.put(key, data)
    return Found(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data), content=info.content)


def _anchor(end: End, prefix: str, files: Iterable[AnchorFile], table: Found) -> Anchor:
    checkpoint = AnchorRef(prefix=prefix, files=tuple(files))
    return Anchor(
        version=end.version,
        state_root=end.state_root,
        manifest=end.manifest,
        checkpoint=checkpoint,
        table=table,
        bytes=sum(file.size for file in checkpoint.files),
    )
