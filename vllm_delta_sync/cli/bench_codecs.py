"""`vllm-delta-sync bench wire`, `encode` and `memory`: what an update costs to send, beside the peers and the limits.

Does not measure anything itself: `vllm_delta_sync.bench` does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vllm_delta_sync import native
from vllm_delta_sync.cli import output
from vllm_delta_sync.cli.bench_input import Cache, DataName, New, Old, Rounds, checkpoints

if TYPE_CHECKING:
    from vllm_delta_sync.bench.encode import EncodeSpeeds
    from vllm_delta_sync.bench.wire import WireSizes

_MISSING = "not installed: pip install fireworks-delta-compression"


def wire(
    old: Old = None,
    new: New = None,
    data: DataName = "cold",
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Bytes of one update by every codec, by the peers, and by entropy."""
    from vllm_delta_sync.bench import wire as measurement

    sizes = measurement.measure(*checkpoints(old, new, data, cache))
    if json:
        output.print_json(asdict(sizes))
        return
    console = output.console()
    console.print(
        f"{sizes.changed:,} of {sizes.changed / sizes.density:,.0f} elements changed ({sizes.density:.3%}); ours are "
        f"whole payloads, to which a manifest of {sizes.manifest_bytes:,} bytes comes"
    )
    console.print(_sizes(sizes))
    for name, count in sizes.dearer_tensors.items():
        console.print(f"tensors that {name} makes larger than both gap and dense do: {count}")


def _sizes(sizes: WireSizes) -> Table:
    grid = Table("how")
    for name in ("bytes", "per change"):
        grid.add_column(name, justify="right")
    for row in sizes.rows:
        if row.bytes is None or row.bytes_per_change is None:
            grid.add_row(row.name, _MISSING, "–")
        else:
            grid.add_row(row.name, f"{row.bytes:,}", f"{row.bytes_per_change:.3f}")
    for name, limit in (("i.i.d.", sizes.entropy.iid), ("given the old exponent", sizes.entropy.conditional)):
        grid.add_row(f"entropy, {name}", f"{limit * sizes.changed:,.0f}", f"{limit:.3f}")
    return grid


def encode(
    old: Old = None,
    new: New = None,
    data: DataName = "cold",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of ours and of torch.")] = 1,
    rounds: Rounds = 5,
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Speed of finding, encoding and decoding one update in memory, beside the peers and the memory's bandwidth."""
    from vllm_delta_sync.bench import encode as measurement

    speeds = measurement.measure(*checkpoints(old, new, data, cache), threads=threads, rounds=rounds)
    if json:
        output.print_json(asdict(speeds))
        return
    console = output.console()
    console.print(f"GB/s of dense weights, {speeds.threads} thread(s), cold cache; {native.backend()}")
    console.print(_speeds(speeds))
    console.print(
        f"both states, counted both: diff {speeds.diff_gb_s:.2f} GB/s, reading alone {speeds.read_gb_s:.2f} GB/s "
        f"({speeds.diff_gb_s / speeds.read_gb_s:.2f})"
    )


def _speeds(speeds: EncodeSpeeds) -> Table:
    grid = Table("how")
    for name in ("diff and encode", "decode"):
        grid.add_column(name, justify="right")
    for name, speed in speeds.encode_gb_s.items():
        grid.add_row(name, f"{speed:.2f}", f"{speeds.decode_gb_s[name]:.2f}")
    if speeds.arc_v3 is None:
        grid.add_row("arc_v3", _MISSING, "–")
    else:
        grid.add_row("arc_v3", f"{speeds.arc_v3.encode_gb_s:.2f}", f"{speeds.arc_v3.decode_gb_s:.2f}")
    grid.add_row("torch ne, nonzero, gather", f"{speeds.torch_nonzero_gb_s:.2f}", "–")
    return grid


def memory(
    old: Old = None,
    new: New = None,
    data: DataName = "cold",
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Memory that publishing takes beyond the model, and staging beside live weights, in processes of their own."""
    from vllm_delta_sync.bench import memory as measurement

    found = measurement.measure(*checkpoints(old, new, data, cache))
    if json:
        output.print_json({coding: asdict(use) for coding, use in found.items()})
        return
    console = output.console()
    for coding, use in found.items():
        publish, stage = use.publish, use.stage
        grid = Table(f"coded as {coding}", "bytes", "relative")
        grid.columns[1].justify = "right"
        for what, count, per, unit in (
            ("publisher: beyond the model, held", publish.held_bytes, publish.held_bytes_per_parameter, "parameter"),
            (
                "publisher: more, at the peak of one update",
                publish.publish_peak_bytes,
                publish.publish_peak_bytes_per_change,
                "change",
            ),
            ("server: staged and undo, held", stage.held_bytes, stage.held_bytes_per_change, "change"),
            ("server: from fetch to commit, at the peak", stage.peak_bytes, stage.peak_bytes_per_change, "change"),
        ):
            grid.add_row(what, f"{count:,}", f"{per:.2f} a {unit}")
        console.print(
            f"{publish.parameters:,} parameters in {publish.model_bytes:,} bytes, {publish.changed:,} changed; opening "
            f"the publisher took {publish.open_peak_bytes:,} bytes at its peak, pages of the base's files among them"
        )
        console.print(grid)
