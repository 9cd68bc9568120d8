"""Each codec of the log as a way to encode a changed block, and what a publisher makes of an update with it.

Does not measure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from vllm_delta_sync.bench.step import Model, Part, parts
from vllm_delta_sync.log import LogWriter, TensorUpdate
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.native import Changes, CtxModel
from vllm_delta_sync.store import Store
from vllm_delta_sync.trainer.splits import split_dim
from vllm_delta_sync.wire import codec_rules, ctx, dtypes, state_hash
from vllm_delta_sync.wire.codecs import Context, ctx_of, dense_block, encode_block
from vllm_delta_sync.wire.encoded import EncodedBlock
from vllm_delta_sync.wire.manifest import BaseRef
from vllm_delta_sync.wire.shard import TARGET_BYTES, Ends, pack_shard
from vllm_delta_sync.wire.sparse import bitmapped, gap_abs_block, gap_of
from vllm_delta_sync.wire.tensors import TensorSpec

Task: TypeAlias = Callable[[], Any]
Run: TypeAlias = Callable[[Sequence[Task]], list[Any]]  # do all of them and give their results, in their order


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A block in which something changed."""

    part: Part
    changes: Changes  # positions within the block

    @property
    def spec(self) -> TensorSpec:
        """The block's tensor."""
        return self.part.spec

    def sample(self) -> ctx.Sample:
        """For models of the ctx codec."""
        return ctx.Sample(self.spec, self.part.start, self.part.old, self.changes, split_dim(self.spec))


@dataclass(frozen=True, slots=True)
class Coding:
    """One way to encode an update."""

    code: Callable[[Found, CtxModel | None], EncodedBlock]  # the model is that of the block's dtype, if there is any
    modelled: bool = False  # whether models are made of the update first


def _adaptive(found: Found, model: CtxModel | None) -> EncodedBlock:
    part = found.part
    context = Context(model, part.old, split_dim(part.spec)) if model is not None else None
    return encode_block(part.spec, found.changes, part.start, part.count, part.new, context)


def _ctx(found: Found, model: CtxModel | None) -> EncodedBlock:
    part = found.part
    if model is None:  # of a dtype of 8 bytes
        return _gap(found, None)
    coded = ctx_of(part.spec, found.changes, part.start, Context(model, part.old, split_dim(part.spec)))
    return coded if coded is not None else _dense(found, None)


def _gap(found: Found, model: CtxModel | None) -> EncodedBlock:
    return gap_of(found.changes) if dtypes.by_name(found.spec.dtype).half else _gap_abs(found, model)


def _gap_abs(found: Found, _: CtxModel | None) -> EncodedBlock:
    return gap_abs_block(found.changes.positions, found.changes.new)


def _bitmap(found: Found, model: CtxModel | None) -> EncodedBlock:
    return bitmapped(_gap(found, model), found.changes.positions, found.part.count)


def _bitmap_abs(found: Found, model: CtxModel | None) -> EncodedBlock:
    return bitmapped(_gap_abs(found, model), found.changes.positions, found.part.count)


def _dense(found: Found, _: CtxModel | None) -> EncodedBlock:
    return dense_block(found.part.new, found.changes.positions.size)


ADAPTIVE = Coding(_adaptive, modelled=True)
CODINGS: Mapping[str, Coding] = {
    codec_rules.NAMES[codec_rules.CTX]: Coding(_ctx, modelled=True),
    codec_rules.NAMES[codec_rules.GAP]: Coding(_gap),
    codec_rules.NAMES[codec_rules.GAP_ABS]: Coding(_gap_abs),
    codec_rules.NAMES[codec_rules.BITMAP]: Coding(_bitmap),
    codec_rules.NAMES[codec_rules.BITMAP_ABS]: Coding(_bitmap_abs),
    codec_rules.NAMES[codec_rules.DENSE]: Coding(_dense),
    "adaptive": ADAPTIVE,
}
"""Every codec of the registry by its name there, and the smallest for each block as a publisher chooses it."""


def one_by_one(tasks: Sequence[Task]) -> list[Any]:
    """The simplest `Run`."""
    return [task() for task in tasks]


def encode(blocks: Sequence[Part], coding: Coding, run: Run = one_by_one) -> list[tuple[Part, EncodedBlock]]:
    """Find what changed in every block of both states, and encode the blocks in which something did.

    A block is encoded as soon as it is compared, while its values are in the cache. Only those that models are made
    from are compared before.
    """
    known: dict[Part, Found] = {}

    def find(part: Part) -> Found:
        return known.get(part) or Found(part, part.diff())

    def sample(part: Part) -> ctx.Sample:
        known[part] = find(part)
        return known[part].sample()

    def code(part: Part) -> EncodedBlock | None:
        found = find(part)
        return coding.code(found, models.get(part.spec.dtype)) if found.changes.positions.size else None

    models = ctx.make_models(_changed(blocks, known), sample) if coding.modelled else {}
    coded = run([partial(code, part) for part in blocks])
    return [(part, one) for part, one in zip(blocks, coded, strict=True) if one is not None]


def _changed(blocks: Sequence[Part], known: dict[Part, Found]) -> Sequence[Part]:
    """The blocks in which something changed: all, if that is so of some of them. Adds what it saw to `known`."""
    known |= {part: Found(part, part.diff()) for part in ctx.chosen(blocks)}
    if all(found.changes.positions.size for found in known.values()):
        return blocks
    known |= {part: Found(part, part.diff()) for part in blocks if part not in known}
    return [part for part in blocks if known[part].changes.positions.size]


def updates(before: Model, after: Model, coding: Coding = ADAPTIVE) -> list[TensorUpdate]:
    """Every tensor that changed, its blocks encoded."""
    blocks: dict[str, list[tuple[int, int, EncodedBlock]]] = {}
    for part, encoded in encode(list(parts(before, after)), coding):
        blocks.setdefault(part.spec.name, []).append((part.start, part.count, encoded))
    return [TensorUpdate(after[name][0], state_hash.of_tensor(*after[name]), found) for name, found in blocks.items()]


def payload_bytes(ends: Ends, found: list[TensorUpdate]) -> int:
    """Bytes of all shards that hold these blocks, with their table: all that is uploaded but the manifest."""
    packed = pack(found, TARGET_BYTES)
    tables = [packed.table.to_bytes(), *[None] * (len(packed.shards) - 1)]
    shards = zip(packed.shards, tables, strict=True)
    return sum(len(pack_shard(ends, payloads, table)[0]) for payloads, table in shards)


def write_log(
    where: str | Store, base: str | os.PathLike[str], models: Iterable[Model], coding: Coding = ADAPTIVE
) -> LogWriter:
    """A log without folds whose version n is the n-th model; its base is named, not written."""
    states = iter(models)
    first = next(states)
    lanes = {spec: state_hash.of_tensor(spec, bits) for spec, bits in first.values()}
    writer = LogWriter.create(where, lanes, base=BaseRef(model=os.fspath(base)))
    for old, new in pairwise([first, *states]):
        found = updates(old, new, coding)
        lanes |= {update.spec: update.lanes for update in found}
        writer.commit(found, state_root=state_hash.state_root(lanes))
    return writer
