"""How fast an update is found, encoded and decoded, in memory: each codec of the log, and the peers.

Does not hash, upload or write into live weights. Nothing is read from disk while the clock runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync import native
from vllm_delta_sync.bench import codings, peers
from vllm_delta_sync.bench.clock import interleaved
from vllm_delta_sync.bench.codings import CODINGS, Coding, Run, Task, one_by_one
from vllm_delta_sync.bench.step import Model, Part, parts, read
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire.codecs import decode_block
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.shard import TARGET_BYTES
from vllm_delta_sync.wire.table import Block


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """10⁹ bytes of the new model a second."""

    encode_gb_s: float
    decode_gb_s: float


@dataclass(frozen=True, slots=True)
class EncodeSpeeds:
    """Speeds from a cold cache. A model is counted once, whatever changed in it, except where both states are read."""

    diff_gb_s: float  # 10⁹ bytes of both states a second: finding and listing what changed
    encode_gb_s: dict[str, float]  # by codec: from both states to the bytes of every block, the search included
    decode_gb_s: dict[str, float]  # by codec: from those bytes, their digests checked, to positions and new values
    arc_v3: PeerSpeed | None  # None: its package is not installed
    torch_nonzero_gb_s: float  # compare, nonzero and gather by torch's own operations, without encoding
    read_gb_s: float  # 10⁹ bytes of both states a second: reading them and nothing else
    threads: int


def measure(old: Path, new: Path, threads: int = 1, rounds: int = 5) -> EncodeSpeeds:
    """Encode and decode the step from one checkpoint to the other, in turns with the others."""
    before, after = read(old, new)
    blocks = list(parts(before, after))
    torch.set_num_threads(threads)
    package = peers.arc_package(patient=False)
    with _workers(threads) as run:
        contenders = _ours(before, after, blocks, run)
        contenders["torch"] = peers.NonzeroGather(before, after).encode
        if package is not None:
            arc = peers.ArcV3(package, before, after)
            contenders["encode arc_v3"] = arc.encode
            contenders["decode arc_v3"] = partial(arc.decode, arc.encode())
        for contender in contenders.values():
            contender()  # page in, and let lazy set-up happen
        seconds = interleaved(contenders, rounds)
    model = sum(part.new.nbytes for part in blocks) / 1e9
    return EncodeSpeeds(
        diff_gb_s=2 * model / seconds["diff"],
        encode_gb_s={name: model / seconds[f"encode {name}"] for name in CODINGS},
        decode_gb_s={name: model / seconds[f"decode {name}"] for name in CODINGS},
        arc_v3=None
        if package is None
        else PeerSpeed(model / seconds["encode arc_v3"], model / seconds["decode arc_v3"]),
        torch_nonzero_gb_s=model / seconds["torch"],
        read_gb_s=2 * model / seconds["read"],
        threads=threads,
    )


def _ours(before: Model, after: Model, blocks: list[Part], run: Run) -> dict[str, Task]:
    sides = [side.view(np.uint8) for part in blocks for side in (part.old, part.new)]
    found: dict[str, Task] = {
        "read": partial(run, [partial(native.read_sum, side) for side in sides]),
        "diff": partial(run, [part.diff for part in blocks]),
    }
    for name, coding in CODINGS.items():
        found[f"encode {name}"] = partial(codings.encode, blocks, coding, run)
        found[f"decode {name}"] = partial(run, [partial(_decode, *item) for item in encoded(before, after, coding)])
    return found


def encoded(before: Model, after: Model, coding: Coding) -> Iterator[tuple[Block, Buffer, Part]]:
    """Every block that changed, as a reader has it: its row, its stored bytes, and both states of its elements."""
    packed = pack(codings.updates(before, after, coding), TARGET_BYTES)
    place = {(part.spec.name, part.start): part for part in parts(before, after)}
    shards = [b"".join(streams) for streams in packed.shards]
    for row in packed.table.blocks:
        stored = shards[row.shard][row.offset : row.offset + row.stored]
        yield row, stored, place[row.spec.name, row.start]


def decode(row: Block, stored: Buffer, part: Part) -> Bits:
    """The new values at the positions that a block lists, verified, as a server decodes it beside its live weights."""
    decoded = decode_block(row, stored, part.old)
    if decoded.values is not None:
        return decoded.values
    return decoded.new_bits(native.gather(part.old.ctypes.data, part.old.itemsize, decoded.positions))


def _decode(row: Block, stored: Buffer, part: Part) -> None:
    """The same, kept no longer than a server does, which stages the changes of one block after the other."""
    decode(row, stored, part)


@contextmanager
def _workers(threads: int) -> Iterator[Run]:
    """How to do many things: one after the other, or on that many threads as a publisher does."""
    if threads == 1:
        yield one_by_one
        return
    with ThreadPoolExecutor(threads) as pool:
        yield lambda tasks: [future.result() for future in [pool.submit(task) for task in tasks]]
