"""The log of tests/golden: a model that is plain arithmetic, and its writer with the clock and the names set.

Holds no assertions. `python tests/golden_log.py` writes the log again and the worked bytes of docs/protocol.md anew: a
change of either is a change of the format.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny_log

from vllm_delta_sync.log import DeltaLog, LogWriter, names, payload
from vllm_delta_sync.log.packing import pack
from vllm_delta_sync.log.stamps import Stamps
from vllm_delta_sync.wire import state_hash
from vllm_delta_sync.wire.catalog import Catalog, Fold
from vllm_delta_sync.wire.checkpoint import write_checkpoint
from vllm_delta_sync.wire.shard import Ends
from vllm_delta_sync.wire.tensors import TensorSpec

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = Path(__file__).parents[1] / "docs" / "protocol.md"
BEGIN, END = "<!-- worked bytes: written by tests/golden_log.py -->\n", "<!-- end of worked bytes -->\n"
ZSTD = (1, 5, 7)  # that wrote the golden files: another version may compress the same to other bytes
RUN = f"{0:032x}"

EMBED, NORM, SCALE = (
    TensorSpec("embed", "BF16", (16, 16)),
    TensorSpec("norm", "F32", (64,)),
    TensorSpec("scale", "BF16", ()),
)


def models() -> list[tiny_log.Model]:
    """The model at versions 0, 1 and 2."""
    embed = [np.arange(0x3C00, 0x3C00 + 256, dtype=np.uint16) for _ in range(3)]
    for after in embed[1:]:
        after[5] += 1  # one step up, which version 2 takes back
        after[6] -= 1
        after[200] ^= 0x8000  # another sign: a step of three bytes
    embed[2][5] -= 1
    embed[2][7] += 2
    norm = [np.arange(0x3F800000, 0x3F800000 + 64, dtype=np.uint32) for _ in range(3)]
    norm[2][[0, 63]] ^= 1
    scale = [np.array([bits], np.uint16) for bits in (0x3F80, 0x3F80, 0x3F81)]
    return [
        {EMBED.name: (EMBED, a), NORM.name: (NORM, b), SCALE.name: (SCALE, c)}
        for a, b, c in zip(embed, norm, scale, strict=True)
    ]


def stamps() -> Stamps:
    """A clock that stands at 1.8e9 s and moves a second at each look, and names 00…00, 00…01 and so on."""
    seconds, numbers = itertools.count(1_800_000_000), itertools.count()
    return Stamps(now=lambda: float(next(seconds)), fresh=lambda: f"{next(numbers):032x}")


def write(bucket: Path) -> None:
    """The base with its anchor, versions 1 and 2, the fold from 0 to 2 and the catalog that names it."""
    fixed, (first, *_), lanes = stamps(), models(), [tiny_log.lanes_of(model) for model in models()]
    roots = [state_hash.state_root(found) for found in lanes]
    with tempfile.TemporaryDirectory() as directory:
        files = write_checkpoint(directory, first.values())
        writer = LogWriter.create(str(bucket), lanes[0], base=None, anchor=files, stamps=fixed)
    for version in (1, 2):
        writer.commit(_updates(version - 1, version), state_root=roots[version], step=10 * version)
    log = DeltaLog.open(str(bucket))
    packed = pack(_updates(0, 2), 1 << 20)
    keys = names.shards(names.fold_prefix(0, 2), fixed.fresh(), len(packed.shards))
    written = payload.write(log.store, Ends(log.run, 0, 2), packed, keys)
    fold = Fold(
        source=0,
        to=2,
        before=roots[0],
        after=roots[2],
        manifest=writer.pointer.manifest,
        table=written.table,
        shards=written.shards,
        totals=written.totals(writer.tip.totals.tensors, writer.tip.totals.elements),
    )
    writer.put_catalog(lambda found: Catalog(run=found.run, oldest=found.oldest, folds=(*found.folds, fold)))


def _updates(source: int, to: int) -> list[tiny_log.TensorUpdate]:
    return tiny_log.updates_between(models()[source], models()[to])


def objects(bucket: Path) -> dict[str, bytes]:
    """Every object of a log by its key."""
    files = (path for path in bucket.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(bucket).as_posix(): path.read_bytes() for path in sorted(files)}


def worked() -> str:
    """LATEST, and manifest and shard of version 1 of the golden log, byte by byte, as docs/protocol.md shows them."""
    log = DeltaLog.open(GOLDEN)
    first = log.chain(0, log.tip())[0]
    key = log.tip().parent
    assert key is not None, "version 2 has a parent"
    manifest, shard = ((GOLDEN / RUN / name).read_bytes() for name in (key.key, first.shards[0].key))
    (block,) = log.table(first).blocks
    lines = ["`LATEST`:", "", *_text((GOLDEN / RUN / "LATEST").read_bytes())]
    lines += [f"`{key.key}`:", "", *_text(manifest)]
    lines += [f"`{first.shards[0].key}`:", ""]
    blob = first.shards[0].data_start
    parts = {
        "the header's length and the header": (0, first.table.start),
        "the table, one zstd frame": (first.table.start, blob),
        "the block's index stream, one zstd frame: gaps 5, 0, 193": (blob, blob + block.length[0]),
        "its value stream, one zstd frame: steps +1, -1, and one to the other sign": (
            blob + block.length[0],
            len(shard),
        ),
    }
    for title, (start, end) in parts.items():
        lines += [f"    {title}", *_dump(shard, start, end)]
    return "\n".join(lines) + "\n"


def _text(data: bytes) -> Iterator[str]:
    text = data.decode()
    yield from (f"    {text[at : at + 112]}" for at in range(0, len(text), 112))
    yield ""


def _dump(data: bytes, start: int, end: int) -> Iterator[str]:
    for at in range(start, end, 16):
        row = data[at : min(at + 16, end)]
        shown = "".join(chr(byte) if 32 < byte < 127 else "." for byte in row)
        yield f"    {at:04x}  {row.hex(' '):<47}  {shown}"


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        bucket = Path(directory) / "bucket"
        write(bucket)
        for key, data in objects(bucket).items():
            path = GOLDEN / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + "\n" + worked() + "\n" + END + after)


if __name__ == "__main__":
    main()
