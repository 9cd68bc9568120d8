"""How many bytes an update takes: each codec of the log, the publisher's choice, the peers, and the entropies.

Does not measure time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_sync.bench import entropy, peers
from vllm_delta_sync.bench.codings import CODINGS, payload_bytes, updates, write_log
from vllm_delta_sync.bench.entropy import Entropy
from vllm_delta_sync.bench.step import parts, read
from vllm_delta_sync.wire.shard import Ends

CHOSEN = ("ctx", "adaptive")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to send the update."""

    name: str
    bytes: int | None  # all that is uploaded; None where the package that would say is not installed
    bytes_per_change: float | None


@dataclass(frozen=True, slots=True)
class WireSizes:
    """One update in every way there is to send it."""

    changed: int  # elements
    density: float  # of all elements
    manifest_bytes: int  # of ours, for any codec; in none of the rows
    rows: tuple[Row, ...]
    dearer_tensors: dict[str, int]  # how many `ctx`, or the choice, code in more bytes than gap and dense do
    entropy: Entropy


def measure(old: Path, new: Path) -> WireSizes:
    """Encode the step from one checkpoint to the other in every way. Needs memory for both and for a dense copy.

    Ours are whole payloads: the shards that are uploaded, with table and container. Raises as `step.read` does.
    """
    before, after = read(old, new)
    blocks = list(parts(before, after))
    with tempfile.TemporaryDirectory() as bucket:
        writer = write_log(bucket, old, [before, after])
    published, ends = writer.tip.totals, Ends(writer.log.run, 0, 1)
    sizes: dict[str, int | None] = {}
    by_tensor: dict[str, dict[str, int]] = {}
    for name, coding in CODINGS.items():
        found = updates(before, after, coding)
        sizes[name] = payload_bytes(ends, found)
        by_tensor[name] = {one.spec.name: sum(code.stored for _, _, code in one.blocks) for one in found}
    package = peers.arc_package(patient=True)
    sizes["arc_v3"] = None if package is None else peers.ArcV3(package, before, after).bytes()
    sizes["xor_zstd"] = peers.xor_zstd_bytes(before, after)
    sizes["int32_bf16"] = peers.int32_bytes(before, after)
    changed = published.changed
    return WireSizes(
        changed=changed,
        density=changed / published.elements,
        manifest_bytes=writer.pointer.manifest.size,
        rows=tuple(Row(name, size, None if size is None else size / changed) for name, size in sizes.items()),
        dearer_tensors={name: _dearer(by_tensor[name], by_tensor["gap"], by_tensor["dense"]) for name in CHOSEN},
        entropy=entropy.measure(blocks),
    )


def _dearer(sizes: Mapping[str, int], *others: Mapping[str, int]) -> int:
    """How many tensors take more bytes than by the best of the others."""
    return sum(size > min(other[name] for other in others) for name, size in sizes.items())
