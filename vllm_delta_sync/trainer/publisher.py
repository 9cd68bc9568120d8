"""The trainer's end of the log: `Publisher` publishes what changed, while training goes on.

Does not gather sharded models, retry what the store refuses, or know who follows the log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Literal, Self

import torch

from vllm_delta_sync.errors import ConfigError, DeltaSyncError, NotFound, PublishError, RivalWriter, UnsettledWrite
from vllm_delta_sync.log import AnchorPolicy, DeltaLog, FoldSchedule
from vllm_delta_sync.log.folder import Anchorage, Folder
from vllm_delta_sync.log.schedule import ANCHORS, FOLDS
from vllm_delta_sync.store import Store, open_store
from vllm_delta_sync.trainer import labels, lineage, source
from vllm_delta_sync.trainer.encode import Encoder
from vllm_delta_sync.trainer.pipeline import Failure, InFlight, Pipeline
from vllm_delta_sync.trainer.publication import Publication
from vllm_delta_sync.trainer.snapshot import Delta
from vllm_delta_sync.trainer.splits import SplitDim, require_dims, split_dim

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes a model, version by version, into one run of a log. Open it with `Publisher.open`.

    Its methods may be called from any thread, one at a time. Beyond the model it holds one copy of it in the published
    dtypes, and the changes of the versions in flight.
    """

    def __init__(
        self,
        at: lineage.Lineage,
        *,
        max_in_flight: int,
        threads: int,
        folds: FoldSchedule | None,
        anchors: AnchorPolicy | None,
        split_dim: SplitDim | None,
    ) -> None:
        self._writer = at.writer
        self._snapshot = at.snapshot
        self._aliases = at.aliases
        self._version = at.writer.tip.version  # the last one given out
        turn = threading.Lock()
        self._folder = _folder(at, turn, folds, anchors)
        self._pipeline = Pipeline(Encoder(at.writer, threads, turn, self._folder, split_dim).write, max_in_flight)
        self._calls = threading.RLock()
        self._closed: DeltaSyncError | None = None

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str] | Store,
        base: source.Weights | str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        dtype: torch.dtype | None = torch.bfloat16,
        model_id: str | None = None,
        revision: str | None = None,
        anchor: Literal["auto", "always", "never"] = "auto",
        max_in_flight: int = 2,
        threads: int | None = None,
        folds: FoldSchedule | None = FOLDS,
        anchors: AnchorPolicy | None = ANCHORS,
        ctx: bool | SplitDim = True,
    ) -> Publisher:
        """Begin a run with `base` as version 0, or continue the current one.

        Args:
            uri: where the log is: `file:///…` or another URI of a store, a path, or a store.
            base: the weights before the first step: a model, its state dict, (name, tensor) pairs, or a checkpoint as a
                directory or Hub id in the local cache. Receivers must be able to start from it.
            resume: continue the run that is current at `uri`, from its last version; begin one if there is none. The
                next publish() then publishes the difference to the model it is given, whatever happened in between.
                The chain is rebuilt from `base`, the checkpoint that version 0 names, or the run's anchor.
            dtype: what fp32 and fp64 tensors of a base in memory are published as; None: as they are. Checkpoints keep
                their dtypes. What is published later is cast to the base's dtypes.
            model_id: Hub id or path by which receivers find the base, if the model does not say itself; checked bit by
                bit against the local copy before it is written down.
            revision: of that Hub id.
            anchor: whether the base itself is uploaded: `auto` where no checkpoint is known to be the same.
            max_in_flight: versions on their way before publish() blocks; each holds about 8 bytes per changed element.
            threads: for comparing and encoding; at most 8 by default.
            folds: which folds to write behind the versions, so that whoever is behind catches up cheaply; None: none.
            anchors: when to write a full checkpoint behind them, for whoever comes late or comes back; None: never.
            ctx: whether blocks are coded against the values before, which halves them. Servers need ranks that split
                a tensor into 2, 4, 8 or 16 parts, or not at all; which dimension they split is guessed from its name,
                or told (0, 1, …) by a function from its `TensorSpec` given here. False for a fleet of other splits.

        Raises:
            ConfigError: an argument is out of range, `ctx` tells a dimension that a tensor lacks, or the base cannot be
                read.
            BaseMismatch: resuming, and nothing at hand is the base of the run.
            StoreError: the store refuses.
        """
        if max_in_flight < 1 or (threads is not None and threads < 1):
            raise ConfigError(f"max_in_flight ({max_in_flight}) and threads ({threads}) must be at least 1")
        if anchor not in ("auto", "always", "never"):
            raise ConfigError(f"anchor is {anchor!r}; it must be 'auto', 'always' or 'never'")
        workers = threads or min(8, os.cpu_count() or 1)
        split = (split_dim if ctx is True else ctx) or None
        at = partial(cls, max_in_flight=max_in_flight, threads=workers, folds=folds, anchors=anchors, split_dim=split)
        store = open_store(os.fspath(uri)) if isinstance(uri, str | os.PathLike) else uri
        if resume:
            try:
                log = DeltaLog.open(store)
            except NotFound:
                pass  # a first start, or one that ended before version 0 was complete
            else:
                fold = folds is not None or anchors is not None
                continued = lineage.continue_run(log, base, dtype, workers, fold=fold)
                require_dims(split, continued.snapshot.specs.values())
                return at(continued)
        if base is None:
            raise ConfigError(f"{store.uri} holds no run to resume; give base= to begin one")
        found = lineage.read_base(base, dtype, model_id, revision)
        require_dims(split, (spec for spec, _ in found.tensors.values()))
        begun = lineage.begin_run(store, found, anchor, workers)
        if resume:
            logger.warning(
                "%s held no run to resume, so run %s was begun; if there should have been one, check that the URI is "
                "right and its file system mounted",
                store.uri,
                begun.writer.log.run,
            )
        return at(begun)

    @property
    def run(self) -> str:
        """The run's id, 32 hex digits."""
        return self._writer.log.run

    @property
    def version(self) -> int:
        """The last version given out; with those in flight."""
        return self._version

    def publish(
        self, weights: source.Weights, *, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Publication:
        """Publish the difference between `weights` and the version before, as the next version.

        Blocks until no more than max_in_flight versions are on their way, and until the changes are found; encoding and
        uploading go on in the background. The weights may be changed as soon as this returns.

        Args:
            weights: the whole model: a module, a mapping or (name, tensor) pairs; any strides, device and float dtype.
            step, metadata: the trainer's own, for whoever reads the log; at most 16 KiB.

        Raises:
            ConfigError: `step` is no integer or beyond 2**62, or `metadata` cannot be written down.
            PublishError: an earlier version did not become durable. It and those behind it were taken back, so the next
                publish() publishes what they held, too; nothing was published by this call.
            BaseMismatch: a tensor is missing, unknown or of another shape than the base's. Nothing was published.
            RivalWriter: another publisher wrote to this run. This one stays closed.
            UnsettledWrite: the store does not tell what became of a version. This publisher stays closed.
        """
        with self._call():
            self._require_open()
            number, texts = labels.checked_step(step), labels.checked_metadata(metadata)
            began = time.perf_counter()
            self._pipeline.wait_for_room()
            self._settle()
            free = time.perf_counter()
            pairs = source.pair_up(weights, self._snapshot.specs.keys(), self._aliases)
            version = self._move_on(pairs, number, texts)
            found = time.perf_counter()
            return Publication(
                version=version.version,
                step=number,
                changed=version.delta.changed,
                elements=self._snapshot.elements,
                waited_s=free - began,
                diff_s=found - free,
                outcome=version.outcome,
            )

    def wait(self) -> None:
        """Block until every version is durable. Raises as `publish` does."""
        with self._call():
            self._require_open()
            self._pipeline.wait_until_done()
            self._settle()

    def close(self) -> None:
        """Wait until every version is durable and the folds that are due are written, and end.

        Raises as `publish` does, once; closing again does nothing. What becomes of folds and anchors is only logged.
        """
        with self._call():
            if self._closed is not None:
                return
            all_durable = False
            try:
                self._pipeline.wait_until_done()
                self._settle()
                all_durable = True
            finally:
                self._end(PublishError("this publisher is closed; open another one with resume=True"), all_durable)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DeltaSyncError as failure:
            if error is None:
                raise
            error.add_note(f"closing the publisher failed, too: {failure}")  # the first error is the one to see

    def _move_on(self, pairs: Iterable[tuple[str, torch.Tensor]], step: int | None, texts: dict[str, str]) -> InFlight:
        """Find what changed and send it on its way. Whatever is raised, a Ctrl-C too, nothing found is lost."""
        before = self._version
        delta: Delta | None = None
        version: InFlight | None = None
        try:
            delta = self._snapshot.advance(pairs)
            version = InFlight(before + 1, step, texts, delta, self._snapshot.at_present())
            self._version = version.version
            self._pipeline.submit(version)
            return version
        except BaseException:
            if delta is not None and (version is None or not self._pipeline.has(version)):
                self._snapshot.undo(delta)
                self._version = before
            raise

    @contextmanager
    def _call(self) -> Iterator[None]:
        if self._pipeline.is_this_thread:
            raise PublishError(
                "a callback of a publication's outcome runs in the thread that publishes, which cannot wait for "
                "itself; call the publisher from another thread"
            )
        with self._calls:
            yield

    def _require_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _end(self, why: DeltaSyncError, finish_folds: bool = False) -> None:
        if self._closed is None:
            self._closed = why
            self._pipeline.stop()
            if self._folder is not None:
                self._folder.close(finish=finish_folds)

    def _settle(self) -> None:
        """After a failure: take back the versions in flight, newest first, and raise what happened."""
        failure = self._pipeline.failure
        if failure is None:
            return
        for version in reversed(failure.versions):
            self._snapshot.undo(version.delta)
        self._version = self._writer.tip.version
        self._pipeline.forget_failure()  # last: after a Ctrl-C in between, all of them are taken back once more
        if isinstance(failure.error, RivalWriter):
            self._end(RivalWriter(f"{failure.error} (this publisher is closed for good)"))
            raise failure.error
        if isinstance(failure.error, UnsettledWrite):
            self._end(failure.error)
            raise failure.error
        raise _unwound(failure) from failure.error


def _folder(
    at: lineage.Lineage, turn: threading.Lock, folds: FoldSchedule | None, anchors: AnchorPolicy | None
) -> Folder | None:
    if folds is None and anchors is None:
        return None
    anchorage = None
    if anchors is not None:
        full = sum(spec.nbytes for spec in at.snapshot.specs.values())
        anchorage = Anchorage(anchors, full, lambda: at.snapshot.freeze(at.files))
    return Folder(at.writer, folds, anchorage, turn, at.shelf)


def _unwound(failure: Failure) -> PublishError:
    first, last = failure.versions[0].version, failure.versions[-1].version
    which = f"version {first}" if first == last else f"versions {first} to {last}"
    return PublishError(
        f"{which} did not become durable and were taken back: {failure.error}; nothing is lost: the next publish(), by "
        "this publisher or one opened with resume=True, publishes the difference"
    )
