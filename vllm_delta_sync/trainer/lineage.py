"""Beginning a run on a base, and continuing one: the writer, and the snapshot at its tip.

Does not publish anything beyond version 0.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync.errors import BaseMismatch, ConfigError, LogError, NotFound, StateHashMismatch
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.base import base_directory
from vllm_delta_sync.log.materialize import reconstructed, reconstructed_without_base
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.log.shelf import MEMORY_BYTES, MODEL_SHARE, Shelf
from vllm_delta_sync.store import Store
from vllm_delta_sync.trainer import base as bases
from vllm_delta_sync.trainer import source
from vllm_delta_sync.trainer.snapshot import Snapshot
from vllm_delta_sync.trainer.spool import SpooledFiles
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.checkpoint import config_files, open_checkpoint, write_checkpoint
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.tensors import TensorSpec

logger = logging.getLogger(__name__)

GivenBase = source.Weights | str | os.PathLike[str]
Found = Path | Mapping[str, tuple[TensorSpec, source.Bits]]  # a checkpoint's directory, or its tensors


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """A run at its tip."""

    writer: LogWriter
    snapshot: Snapshot  # the state at the writer's tip
    aliases: Mapping[str, str]  # tied name → its name in the base
    files: Mapping[str, bytes]  # config, tokenizer and the like, by file name, for a checkpoint of any version
    shelf: Shelf  # what folds are composed of; with the deltas that were read on the way to the tip, if they were kept


def read_base(base: GivenBase, dtype: torch.dtype | None, model_id: str | None, revision: str | None) -> bases.Base:
    """The base as bits, from memory or from a checkpoint. Raises ConfigError when it cannot be read."""
    if not isinstance(base, str | os.PathLike):
        return bases.from_weights(base, dtype, model_id, revision)
    if model_id is not None:
        raise ConfigError("model_id is for a base in memory; a base given by path or Hub id is what receivers look for")
    return bases.from_path(base, revision)


def begin_run(store: Store, base: bases.Base, anchor: str, threads: int) -> Lineage:
    """Write version 0: the base's name and state hash, and its files where `anchor` asks or it has no name."""
    snapshot = Snapshot(base.tensors, threads)
    upload = anchor == "always" or (anchor == "auto" and base.ref is None)
    if upload:
        logger.info("uploading the base to %s%s", store.uri, f": {base.why_not}" if base.why_not else "")
    elif base.ref is None:
        logger.warning("receivers must bring the base of %s: %s, and anchor is 'never'", store.uri, base.why_not)
    with tempfile.TemporaryDirectory(prefix="vllm-delta-sync-") as directory:
        files = _write_anchor(Path(directory), base) if upload else []
        writer = LogWriter.create(store, snapshot.lanes, base=base.ref, anchor=files)
    return Lineage(
        writer, snapshot, base.aliases, SpooledFiles(base.files), _shelf(writer, snapshot.specs.values(), threads)
    )


def continue_run(
    log: DeltaLog, base: GivenBase | None, dtype: torch.dtype | None, threads: int, *, fold: bool
) -> Lineage:
    """Rebuild the tip of a run from a base and the chain, each version proven by its state hash.

    Where nothing at hand is the base, an anchor is what it begins with.

    Args:
        fold: whether to keep the deltas on the way on the shelf, as they can be folded only by who has the values
            before them.

    Raises BaseMismatch when there is no anchor either, LogError when the chain is damaged.
    """
    writer = LogWriter.attach(log)
    first = log.base(writer.pointer)
    shelf = _shelf(writer, log.table(first).tensors, threads)
    keep = shelf.add if fold else None
    if base is not None and not isinstance(base, torch.nn.Module | Mapping | str | os.PathLike):
        base = dict(base)  # pairs can be read only once
    refused: list[str] = []
    for candidate in _candidates(first, base, dtype, refused):
        with ExitStack() as stack:
            try:
                found = stack.enter_context(base_directory(log, first, candidate))
                read = open_checkpoint(found) if isinstance(found, Path) else found
            except (LogError, NotFound, OSError) as error:  # emptied or damaged since; the next one may not be
                refused.append(str(error))
                continue
            try:
                replica, _ = stack.enter_context(reconstructed(log, writer.tip.version, read, keep=keep))
            except BaseMismatch as error:
                refused.append(str(error))
                continue
            return _at_tip(writer, shelf, replica, base, found, threads)
    if log.catalog(writer.pointer).anchors:
        with reconstructed_without_base(log, writer.tip.version, keep) as (replica, beginning):
            return _at_tip(writer, shelf, replica, base, beginning, threads)
    raise BaseMismatch(
        f"{log.store.uri}: nothing at hand is the base of this run ({'; '.join(refused) or 'none was given'}); give "
        "its checkpoint as base=, or begin a new run without resume"
    )


def _at_tip(
    writer: LogWriter, shelf: Shelf, replica: Replica, base: GivenBase | None, found: Found, threads: int
) -> Lineage:
    """A replica at the tip becomes the snapshot. `found`: what it began with, whose files are the model's."""
    snapshot = Snapshot({name: (spec, _own(bits)) for name, (spec, bits) in replica.tensors.items()}, threads)
    if state_hash.state_root(snapshot.lanes) != writer.tip.state_root:
        raise StateHashMismatch(f"{writer.log.store.uri}: rebuilding version {writer.tip.version} gave another state")
    return Lineage(writer, snapshot, _aliases(base, snapshot), SpooledFiles(_files(base, found)), shelf)


def _shelf(writer: LogWriter, specs: Iterable[TensorSpec], threads: int) -> Shelf:
    memory_bytes = max(MEMORY_BYTES, sum(spec.nbytes for spec in specs) // MODEL_SHARE)
    return Shelf(writer.log, writer.pointer, memory_bytes=memory_bytes, threads=max(1, threads // 2))


def _candidates(
    first: Manifest, base: GivenBase | None, dtype: torch.dtype | None, refused: list[str]
) -> Iterator[Path | bases.Tensors | None]:
    """What may be the base of a run, the cheapest to read first; None stands for the run's anchor.

    A name that leads nowhere is added to `refused`.
    """
    named: list[tuple[str, str | None]] = [(str(base), None)] if isinstance(base, str | os.PathLike) else []
    if first.base is not None:
        named.append((first.base.model, first.base.revision))
    for name, revision in named:
        if found := bases.locate(name, revision):
            yield found[0]
        else:
            refused.append(f"{name!r} is neither a directory nor in the local Hugging Face cache")
    if first.anchor is not None:
        yield None
    if base is not None and not isinstance(base, str | os.PathLike):
        yield bases.from_weights(base, dtype, None, None).tensors


def _aliases(base: GivenBase | None, snapshot: Snapshot) -> dict[str, str]:
    if not isinstance(base, torch.nn.Module | Mapping):
        return {}
    _, aliases = source.untie(source.state_of(base))
    return {name: owner for name, owner in aliases.items() if owner in snapshot.specs}


def _files(base: GivenBase | None, found: Found) -> dict[str, bytes]:
    if isinstance(found, Path):
        return {path.name: path.read_bytes() for path in config_files(found)}
    assert base is not None and not isinstance(base, str | os.PathLike), "tensors in memory are those of the base given"
    return bases.config_of(base, dict(found))


def _own(bits: source.Bits) -> source.Bits:
    return bits if bits.flags.writeable else np.array(bits)


def _write_anchor(directory: Path, base: bases.Base) -> list[Path]:
    written = write_checkpoint(directory, base.tensors.values())
    for name, data in base.files.items():
        (directory / name).write_bytes(data)
        written.append(directory / name)
    return written
