"""The columns of a version's table as a safetensors file, and the rules that they must keep among themselves.

Does not build `Block` rows: that is `table`, once everything here has been checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.native.ctx_types import GAP_SYMBOLS, STEP_SYMBOLS
from vllm_delta_sync.wire import codec_rules, container, dtypes
from vllm_delta_sync.wire.tensors import MAX_RANK, TensorSpec

Columns: TypeAlias = dict[str, npt.NDArray[Any]]

MAX_COUNT = 1 << 24  # elements of a block: what decoding one may take, for a writer makes them of 2**22
MAX_TENSORS = 1 << 19
MAX_BLOCKS = 1 << 20
_LIMIT = 1 << 48  # every number in the table is below this, so sums of a few never wrap

# name → (safetensors dtype, numpy dtype, trailing shape)
_SCHEMA: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "tensors.names": ("U8", "<u1", ()),
    "tensors.dtype": ("U8", "<u1", ()),
    "tensors.rank": ("U8", "<u1", ()),
    "tensors.shape": ("I64", "<i8", ()),
    "tensors.hash": ("U32", "<u4", (4,)),
    "blocks.tensor": ("U32", "<u4", ()),
    "blocks.start": ("U64", "<u8", ()),
    "blocks.count": ("U64", "<u8", ()),
    "blocks.codec": ("U8", "<u1", ()),
    "blocks.changed": ("U64", "<u8", ()),
    "blocks.shard": ("U32", "<u4", ()),
    "blocks.offset": ("U64", "<u8", ()),
    "blocks.length": ("U64", "<u8", (2,)),
    "blocks.raw": ("U64", "<u8", (2,)),
    "blocks.digest": ("U8", "<u1", (16,)),
    "blocks.model": ("U8", "<u1", ()),
    "models.classes": ("U8", "<u1", ()),
    "models.last": ("U8", "<u1", ()),
    "models.gaps": ("U16", "<u2", (GAP_SYMBOLS,)),
    "models.steps": ("U16", "<u2", (STEP_SYMBOLS,)),
}


# These a table has all, or has none when it has no ctx blocks.
_CTX = frozenset(("blocks.model", "models.classes", "models.last", "models.gaps", "models.steps"))


def pack(columns: Columns) -> bytes:
    """The safetensors file of the columns, widest elements first so that each is aligned."""
    order = sorted(
        _SCHEMA if len(columns["models.classes"]) else _SCHEMA.keys() - _CTX,
        key=lambda name: (-np.dtype(_SCHEMA[name][1]).itemsize, name),
    )
    head = container.layout([(name, _SCHEMA[name][0], columns[name].shape) for name in order], {})
    return b"".join((head, *(np.ascontiguousarray(columns[name], _SCHEMA[name][1]).tobytes() for name in order)))


def unpack(raw: bytes, what: str) -> Columns:
    """The columns of a table file as views of `raw`; raises MalformedObject unless they are exactly the schema's."""
    header = container.parse_file(raw, what)
    schema = _SCHEMA.keys() if _CTX & header.entries.keys() else _SCHEMA.keys() - _CTX
    if set(header.entries) != schema:
        odd = sorted(set(header.entries) ^ schema)
        raise MalformedObject(f"{what}: not the columns of format 1; missing or unknown: {', '.join(odd)[:200]}")
    found: Columns = {}
    for name, (dtype, numpy_dtype, trailing) in _SCHEMA.items():
        if name not in schema:
            found[name] = np.zeros(
                (len(found["blocks.tensor"]) if name == "blocks.model" else 0, *trailing), numpy_dtype
            )
            continue
        entry = header.entries[name]
        if entry.dtype != dtype or len(entry.shape) != 1 + len(trailing) or entry.shape[1:] != trailing:
            raise MalformedObject(f"{what}: column {name} is {entry.dtype} {list(entry.shape)}, not {dtype}")
        found[name] = np.frombuffer(raw[entry.start : entry.end], numpy_dtype).reshape(entry.shape)
    for group, first, most in (
        ("tensors.", "tensors.dtype", MAX_TENSORS),
        ("blocks.", "blocks.tensor", MAX_BLOCKS),
    ):
        if len(found[first]) > most:
            raise MalformedObject(f"{what}: {len(found[first])} rows of {group}*, at most {most} are allowed")
        for name in _SCHEMA:
            free = name in ("tensors.names", "tensors.shape")
            if name.startswith(group) and not free and len(found[name]) != len(found[first]):
                raise MalformedObject(f"{what}: column {name} has {len(found[name])} rows, {first} {len(found[first])}")
    return found


def read_tensors(found: Columns, what: str) -> tuple[TensorSpec, ...]:
    """The tensors that the columns describe; raises MalformedObject unless well formed and sorted by unique names."""
    try:
        text = found["tensors.names"].tobytes().decode()
    except UnicodeDecodeError:
        raise MalformedObject(f"{what}: tensor names are not UTF-8") from None
    names = text.split("\n")
    if names.pop() != "" or len(names) != len(found["tensors.dtype"]):
        raise MalformedObject(f"{what}: tensors.names does not hold one name, ended by a line feed, per tensor")
    ranks = found["tensors.rank"]
    if (ranks > MAX_RANK).any() or int(ranks.sum(dtype=np.int64)) != len(found["tensors.shape"]):
        raise MalformedObject(f"{what}: tensors.rank does not add up to the {len(found['tensors.shape'])} sizes listed")
    sizes, tensors, first = found["tensors.shape"].tolist(), [], 0
    for name, code, rank in zip(names, found["tensors.dtype"].tolist(), ranks.tolist(), strict=True):
        try:
            tensors.append(TensorSpec(name, dtypes.by_code(code).name, tuple(sizes[first : first + rank])))
        except MalformedObject as error:
            raise MalformedObject(f"{what}: {error}") from None
        first += rank
    for left, right in itertools.pairwise(names):
        if left.encode() >= right.encode():
            raise MalformedObject(f"{what}: tensor {right!r} after {left!r}: names must be sorted and unique")
    return tuple(tensors)


def check_blocks(found: Columns, tensors: tuple[TensorSpec, ...], what: str) -> None:
    """Raise MalformedObject unless every block is in range, sorted, disjoint from others and possible for its codec."""
    blocks = {name.removeprefix("blocks."): found[name] for name in _SCHEMA if name.startswith("blocks.")}
    for name, column in blocks.items():
        if name != "digest" and column.size and int(column.max()) >= _LIMIT:
            raise MalformedObject(f"{what}: blocks.{name} holds {int(column.max())}, beyond any file or tensor")
    owner = blocks["tensor"].astype(np.int64)
    if owner.size and int(owner.max()) >= len(tensors):
        raise MalformedObject(f"{what}: a block names tensor {int(owner.max())} of {len(tensors)}")
    start, count, changed = (blocks[name].astype(np.int64) for name in ("start", "count", "changed"))
    numel = np.array([spec.numel for spec in tensors], np.int64)[owner]
    width = np.array([spec.width for spec in tensors], np.int64)[owner]
    half = np.array([dtypes.by_name(spec.dtype).half for spec in tensors], bool)[owner]

    def refuse(wrong: npt.NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            name, first, last = tensors[owner[row]].name, start[row], start[row] + count[row]
            raise MalformedObject(f"{what}: block {row}, {name!r} [{first}, {last}): {why}")

    refuse((count < 1) | (count > MAX_COUNT), f"a block holds 1 to {MAX_COUNT} elements")
    refuse(start + count > numel, "it reaches beyond its tensor")
    refuse((changed < 1) | (changed > count), "the number of changed elements must be 1 to its count")
    if len(owner) > 1:
        same = owner[1:] == owner[:-1]
        unsorted = (owner[1:] < owner[:-1]) | (same & (start[1:] < start[:-1] + count[:-1]))
        refuse(np.concatenate(([False], unsorted)), "it overlaps the block before it, or is out of order")
    length, raw = blocks["length"].astype(np.int64), blocks["raw"].astype(np.int64)
    models = len(found["models.classes"])
    columns = blocks["codec"], count, changed, width, half, length, raw, blocks["model"]
    for wrong, why in codec_rules.violations(*columns, models):
        refuse(wrong, why)
    order = np.lexsort((blocks["offset"], blocks["shard"]))
    shard, offset = blocks["shard"][order], blocks["offset"][order].astype(np.int64)
    end = offset + length[order].sum(axis=1)
    if ((shard[1:] == shard[:-1]) & (offset[1:] < end[:-1])).any():
        raise MalformedObject(f"{what}: two blocks share bytes of a shard")


def model_columns(models: Sequence[native.CtxModel]) -> Columns:
    """The columns of the models that a table's blocks are coded with."""
    return {
        "models.classes": np.array([model.last.size for model in models], np.uint8),
        "models.last": np.concatenate([np.empty(0, np.uint8), *(model.last for model in models)]),
        "models.gaps": np.concatenate([np.empty((0, GAP_SYMBOLS), np.uint16), *(model.gaps for model in models)]),
        "models.steps": np.concatenate([np.empty((0, STEP_SYMBOLS), np.uint16), *(model.steps for model in models)]),
    }


def read_models(found: Columns, what: str) -> tuple[native.CtxModel, ...]:
    """The models that the columns describe; raises MalformedObject unless each is one."""
    classes = found["models.classes"].tolist()
    rows = {len(found[f"models.{name}"]) for name in ("last", "gaps", "steps")}
    if len(classes) > codec_rules.MAX_MODELS or rows != {sum(classes)}:
        raise MalformedObject(f"{what}: {len(classes)} models of {sum(classes)} classes, where {rows} are described")
    models, first = [], 0
    for count in classes:
        part = slice(first, first + count)
        try:
            # Copied, so that a model does not keep the whole table's bytes, nor lie unaligned in them.
            models.append(
                native.ctx_model(*(found[f"models.{name}"][part].copy() for name in ("last", "gaps", "steps")))
            )
        except MalformedObject as error:
            raise MalformedObject(f"{what}: model {len(models)}: {error}") from None
        first += count
    return tuple(models)
