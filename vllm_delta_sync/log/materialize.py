"""The whole model at a version: a proven base, and every delta since applied to it and checked by state hash.

Does not touch live weights, and does not write files: `export` does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseMismatch, ConfigError, StateHashMismatch, VersionGap
from vllm_delta_sync.log import anchors
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.table import Block, VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog

Tensor: TypeAlias = tuple[TensorSpec, npt.NDArray[Any]]  # with its bits uW[numel]
Base: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor] | None


def materialize(log: DeltaLog, version: int, base: Base = None, *, progress: Progress = silent) -> dict[str, Tensor]:
    """Every published tensor at a version, by name; tensors that never changed are views of the base.

    Args:
        base: the checkpoint of version 0: a directory, its tensors (the bits are not written to), or None for the run's
            own anchor or the directory that version 0 names.

    Raises:
        BaseMismatch: the base lacks a tensor, or one differs from version 0; it is named.
        StateHashMismatch: a version does not come to the state hash it states.
        VersionGap: there is no such version.
        ConfigError: no base was given and the log offers none that can be read here.
    """
    chain = log.chain(-1, log.tip())
    if not 0 <= version < len(chain):
        raise VersionGap(f"{log.store.uri}: there is no version {version}; the log holds 0 to {len(chain) - 1}")
    chain = chain[: version + 1]
    with base_directory(log, chain[0], base) as found:
        tensors = open_checkpoint(found) if isinstance(found, Path) else found
        state = _State(log.table(chain[0]), tensors, progress)
    for manifest in chain[1:]:
        progress("applying deltas", manifest.version, version)
        state.apply(log, manifest)
    return state.tensors


@contextmanager
def base_directory(log: DeltaLog, first: Manifest, base: Base) -> Iterator[Path | Mapping[str, Tensor]]:
    """The base as a directory or tensors; an anchor is fetched to a directory that is removed at the end."""
    if isinstance(base, Mapping):
        yield base
    elif base is not None:
        yield Path(base)
    elif first.anchor is not None:
        with tempfile.TemporaryDirectory(prefix="vllm-delta-sync-") as directory:
            anchors.fetch(log.store, first.anchor, Path(directory))
            yield Path(directory)
    elif first.base is not None and Path(first.base.model).is_dir():
        yield Path(first.base.model)
    else:
        named = f"{first.base.model!r}, which is no directory here" if first.base else "no base"
        raise ConfigError(
            f"{log.store.uri}: version 0 has no anchor and names {named}; give the base checkpoint's directory"
        )


class _State:
    """A model's tensors and lanes, moving from version to version."""

    def __init__(self, table: VersionTable, base: Mapping[str, Tensor], progress: Progress) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._specs = {spec.name: spec for spec in table.tensors}
        self._lanes = dict(zip(table.tensors, table.hashes, strict=True))
        self._own: set[str] = set()  # tensors whose bits are copies of ours, not the base's
        for index, (spec, lanes) in enumerate(self._lanes.items()):
            progress("proving the base", index, len(self._lanes))
            self.tensors[spec.name] = _proven(spec, lanes, base)
        progress("proving the base", len(self._lanes), len(self._lanes))

    def apply(self, log: DeltaLog, manifest: Manifest) -> None:
        """Move to the version after the present one; the model is not usable any more if this raises."""
        table = log.table(manifest)
        what = f"{log.store.uri}/{manifest.table.key}"
        table.require_known(self._specs, what)
        for block, payload in log.block_bytes(manifest, table):
            self._apply_block(block, payload)
        for spec, lanes in zip(table.tensors, table.hashes, strict=True):
            if not np.array_equal(self._lanes[spec], lanes):
                raise StateHashMismatch(
                    f"{what}: version {manifest.version} leaves tensor {spec.name!r} at state hash "
                    f"{state_hash.to_hex(self._lanes[spec])}, but states {state_hash.to_hex(lanes)}"
                )
        root = state_hash.state_root(self._lanes)
        if root != manifest.state_root:
            raise StateHashMismatch(
                f"{what}: version {manifest.version} comes to state root {root}, not {manifest.state_root}"
            )

    def _apply_block(self, block: Block, payload: bytes | bytearray | memoryview) -> None:
        spec, decoded = block.spec, decode_block(block, payload)
        if spec.name not in self._own:
            self.tensors[spec.name] = spec, np.array(self.tensors[spec.name][1])
            self._own.add(spec.name)
        bits = self.tensors[spec.name][1][block.start : block.start + block.count]
        old = bits[decoded.positions]
        new = decoded.new_bits(old)
        effect = native.hash_changes(decoded.positions, block.start, old, new, state_hash.seed(spec))
        bits[decoded.positions] = new
        self._lanes[spec] = state_hash.add(self._lanes[spec], effect)


def _proven(spec: TensorSpec, lanes: state_hash.Lanes, base: Mapping[str, Tensor]) -> Tensor:
    if spec.name not in base:
        raise BaseMismatch(
            f"the base has no tensor {spec.name!r}, which version 0 of the log lists; is it the right one?"
        )
    found, bits = base[spec.name]
    if found != spec:
        raise BaseMismatch(
            f"tensor {spec.name!r} of the base is {found.dtype} {list(found.shape)}, version 0 of the log has "
            f"{spec.dtype} {list(spec.shape)}; is it the right base, in the published dtype?"
        )
    bits = bits.reshape(-1)
    if not np.array_equal(state_hash.of_tensor(spec, bits), lanes):
        raise BaseMismatch(f"tensor {spec.name!r} of the base does not hold the values of version 0 of the log")
    return spec, bits
