"""From a version's changes to objects in the log: encodes the blocks and commits them, on behalf of the pipeline.

Does not find changes and does not retry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import groupby

import numpy as np

from vllm_delta_sync.log import LogWriter, TensorUpdate
from vllm_delta_sync.log.compose import Held, hold
from vllm_delta_sync.log.folder import Folder
from vllm_delta_sync.log.layers import Changed, End, Layer
from vllm_delta_sync.native import CtxModel
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.trainer.pipeline import InFlight
from vllm_delta_sync.trainer.publication import Published
from vllm_delta_sync.trainer.snapshot import BlockDelta, Delta
from vllm_delta_sync.trainer.splits import SplitDim
from vllm_delta_sync.wire import ctx, dtypes
from vllm_delta_sync.wire.codec_rules import DENSE
from vllm_delta_sync.wire.codecs import Context, encode_block
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.tensors import TensorSpec

logger = logging.getLogger(__name__)


class Encoder:
    """Writes versions through `writer`, encoding `threads` blocks at a time.

    Args:
        turn: held while a version is written, for the writer is not to be used from two threads at a time.
        folder: told of each version; None where nothing folds them.
        split: which dimension of a tensor servers split, to code blocks against the values before; None: do not.
    """

    def __init__(
        self, writer: LogWriter, threads: int, turn: threading.Lock, folder: Folder | None, split: SplitDim | None
    ) -> None:
        self._writer = writer
        self._threads = threads
        self._turn = turn
        self._folder = folder
        self._split_dim = split

    def write(self, version: InFlight) -> Published:
        """Make a version durable. Raises what `LogWriter.commit` raises."""
        began = time.perf_counter()
        coder = _Coder(version, self._split_dim)
        with ThreadPoolExecutor(self._threads, "delta-sync-encode") as pool:
            encoded = list(pool.map(coder.encode, version.delta.blocks))
            ready = time.perf_counter()
            with self._turn:
                before = _tip(self._writer)
                manifest = self._writer.commit(
                    list(_updates(version.delta, encoded)),
                    state_root=version.delta.state_root,
                    step=version.step,
                    metadata=version.metadata,
                )
                pointer, after = self._writer.pointer, _tip(self._writer)
            done = time.perf_counter()
            assert manifest.version == version.version, f"{manifest.version} was written, {version.version} given out"
            if self._folder is not None:
                self._folder.published(after, _layer(before, after, version.delta, encoded, pool))
        return Published(
            version=manifest.version,
            manifest=pointer.manifest.key,
            sha256=pointer.manifest.sha256,
            bytes=manifest.totals.bytes,
            encode_s=ready - began,
            upload_s=done - ready,
        )


class _Coder:
    """Encodes the blocks of one version as what takes least."""

    def __init__(self, version: InFlight, split_dim: SplitDim | None) -> None:
        self._state = version.state
        self._split_dim = split_dim
        self._models: dict[str, CtxModel] = {}
        if split_dim is not None:
            self._models = ctx.make_models(version.delta.blocks, self._sample)

    def encode(self, block: BlockDelta) -> EncodedBlock:
        """The smallest encoding of a block's changes."""
        spec, count, current = block.spec, block.count, block.current
        context = None
        if spec.dtype in self._models:
            context = Context(self._models[spec.dtype], self._old(block), self._dim(spec))
        if current is not None:
            return encode_block(spec, block.changes, block.start, count, current, context)
        # The snapshot has moved on, so the block's elements of this version are gone; only the dense codec needs them.
        absent = np.broadcast_to(np.zeros(1, dtypes.by_name(spec.dtype).bits), count)
        encoded = encode_block(spec, block.changes, block.start, count, absent, context)
        assert encoded.codec != DENSE, f"{spec.name}: {encoded.changed} of {count} elements became a dense block"
        return encoded

    def _sample(self, block: BlockDelta) -> ctx.Sample:
        return ctx.Sample(block.spec, block.start, self._old(block), block.changes, self._dim(block.spec))

    def _old(self, block: BlockDelta) -> Bits:
        """The bits uW[count] of a block before it changed."""
        bits = self._state.read_block(block.spec, block.start, block.count)
        block.changes.undo(bits)
        return bits

    def _dim(self, spec: TensorSpec) -> int:
        assert self._split_dim is not None, "there are models"
        return self._split_dim(spec)


def _tip(writer: LogWriter) -> End:
    return End(writer.tip.version, writer.tip.state_root, writer.pointer.manifest)


def _layer(before: End, after: End, delta: Delta, encoded: list[EncodedBlock], pool: Executor) -> Layer | None:
    """What `folder` composes: with the steps of blocks that went into the log as values.

    None where that fails: the version is in the log by now, and must not count as one that is not.
    """
    found: dict[str, list[Held]] = {}
    try:
        for block, held in zip(delta.blocks, pool.map(_held, delta.blocks, encoded), strict=True):
            found.setdefault(block.spec.name, []).append(held)
    except Exception:
        logger.exception("version %d cannot be folded from memory", after.version)
        return None
    return Layer(before, after, {spec.name: Changed(spec, delta.after[spec], found[spec.name]) for spec in delta.after})


def _held(block: BlockDelta, code: EncodedBlock) -> Held:
    return hold(block.spec, block.start, block.count, code, block.changes)


def _updates(delta: Delta, encoded: list[EncodedBlock]) -> Iterator[TensorUpdate]:
    pairs = zip(delta.blocks, encoded, strict=True)
    for spec, group in groupby(pairs, key=lambda pair: pair[0].spec):
        yield TensorUpdate(spec, delta.after[spec], [(block.start, block.count, code) for block, code in group])
