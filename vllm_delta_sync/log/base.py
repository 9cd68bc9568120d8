"""The checkpoint that a model at some version begins with: version 0's, wherever it is, or an anchor's.

Does not apply anything to it.
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

from vllm_delta_sync.errors import BaseMismatch, ConfigError
from vllm_delta_sync.log import anchors
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.checkpoint import open_checkpoint
from vllm_delta_sync.wire.manifest import AnchorRef, Manifest
from vllm_delta_sync.wire.table import VersionTable
from vllm_delta_sync.wire.tensors import TensorSpec

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog

Tensor: TypeAlias = tuple[TensorSpec, npt.NDArray[Any]]  # with its bits uW[numel]
Base: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor] | None


@contextmanager
def base_directory(log: DeltaLog, first: Manifest, base: Base) -> Iterator[Path | Mapping[str, Tensor]]:
    """The base as a directory or tensors; an anchor is fetched to a directory that is removed at the end."""
    if isinstance(base, Mapping):
        yield base
    elif base is not None:
        yield Path(base)
    elif first.anchor is not None:  # before the directory that is named: nobody can have changed it since
        with anchor_directory(log, first.anchor) as directory:
            yield directory
    elif first.base is not None and Path(first.base.model).is_dir():
        yield Path(first.base.model)
    else:
        named = f"{first.base.model!r}, which is no directory here" if first.base else "no base"
        raise ConfigError(
            f"{log.store.uri}: version 0 has no anchor and names {named}; give the base checkpoint's directory"
        )


@contextmanager
def anchor_directory(log: DeltaLog, anchor: AnchorRef) -> Iterator[Path]:
    """The files of an anchor, verified, in a directory that is removed at the end; files mapped until then stay so."""
    with tempfile.TemporaryDirectory(prefix="vllm-delta-sync-") as directory:
        anchors.fetch(log.store, anchor, Path(directory))
        yield Path(directory)


def base_bytes(first: Manifest, base: Base) -> int | None:
    """What `base_directory` has to fetch; None when it would find no base."""
    if base is None and first.anchor is not None:
        return sum(file.size for file in first.anchor.files)
    return 0 if base is not None or (first.base is not None and Path(first.base.model).is_dir()) else None


def proven(
    table: VersionTable, found: Path | Mapping[str, Tensor], where: str, progress: Progress = silent
) -> dict[str, Tensor]:
    """The tensors of a checkpoint that a table of the whole model lists, by name, once each has the state hash there.

    `where` says in messages what the checkpoint should be. Raises BaseMismatch, naming the tensor.
    """
    tensors = open_checkpoint(found) if isinstance(found, Path) else found
    proof: dict[str, Tensor] = {}
    for index, (spec, lanes) in enumerate(zip(table.tensors, table.hashes, strict=True)):
        progress("proving the base", index, len(table.tensors))
        proof[spec.name] = _proven(spec, lanes, tensors, where)
    progress("proving the base", len(table.tensors), len(table.tensors))
    return proof


def _proven(spec: TensorSpec, lanes: state_hash.Lanes, base: Mapping[str, Tensor], where: str) -> Tensor:
    if spec.name not in base:
        raise BaseMismatch(f"the base has no tensor {spec.name!r}, which {where} lists; is it the right one?")
    found, bits = base[spec.name]
    if found != spec:
        raise BaseMismatch(
            f"tensor {spec.name!r} of the base is {found.dtype} {list(found.shape)}, {where} has "
            f"{spec.dtype} {list(spec.shape)}; is it the right base, in the published dtype?"
        )
    bits = bits.reshape(-1)
    if not np.array_equal(state_hash.of_tensor(spec, bits), lanes):
        raise BaseMismatch(f"tensor {spec.name!r} of the base does not hold the values of {where}")
    return spec, bits
