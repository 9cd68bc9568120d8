"""`vllm-delta-sync bench`: measure this machine, beside the peers.

Does not measure anything itself: `vllm_delta_sync.bench` does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_delta_sync import native
from vllm_delta_sync.cli import output, schedule_options
from vllm_delta_sync.cli.bench_codecs import encode, memory, wire
from vllm_delta_sync.cli.bench_curves import curves
from vllm_delta_sync.cli.bench_input import Cache, DataName, New, Old, Rounds, checkpoints
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log import FoldSchedule
from vllm_delta_sync.log.schedule import FOLDS

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Measure this machine."
)

app.command()(wire)
app.command()(encode)
app.command()(memory)
app.command()(curves)


@app.command()
def data(cache: Cache = Path(".cache"), json: output.AsJson = False) -> None:
    """Make the updates that are measured on: cold, warm, sparse and dense."""
    from vllm_delta_sync.bench.data import Data, changed, made

    found = {kind.value: made(kind, cache.absolute()) for kind in Data}
    rows = {kind: {"old": str(old), "new": str(new), **asdict(changed(old, new))} for kind, (old, new) in found.items()}
    if json:
        output.print_json({**rows})
        return
    console = Console(soft_wrap=True, highlight=False)
    for kind, row in rows.items():
        console.print(f"{kind:8}{row['changed']:12,} of {row['elements']:,} elements change, {row['density']:.3%}")
        console.print(f"        {row['old']}  →  {row['new']}")


@app.command()
def apply(
    old: Old = None,
    new: New = None,
    data: DataName = "cold",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each contender.")] = 1,
    rounds: Rounds = 9,
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Time to write one update into live weights: ours, torch's index_copy_, vLLM's own sparse patching."""
    from vllm_delta_sync.bench import apply as measurement

    times = measurement.measure(*checkpoints(old, new, data, cache), threads=threads, rounds=rounds)
    if json:
        output.print_json(asdict(times))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{times.changed:,} changed elements, {times.threads} thread(s), cold cache; {native.backend()}")
    for name, milliseconds in (
        ("ours (compares, can undo)", times.ours_ms),
        ("ours on two threads", times.ours_2threads_ms),
        ("torch index_copy_", times.index_copy_ms),
        ("vLLM sparse patching", times.vllm_sparse_ms),
    ):
        console.print(f"{name:28}{milliseconds:10.2f} ms")


@app.command()
def hash(
    old: Old = None,
    new: New = None,
    data: DataName = "cold",
    rounds: Rounds = 9,
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Speed of a full pass of the state hash over a checkpoint, beside that of reading the same memory."""
    from vllm_delta_sync.bench import hash as measurement

    speed = measurement.measure(checkpoints(old, new, data, cache)[1], rounds=rounds)
    if json:
        output.print_json(asdict(speed))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"state hash {speed.hash_gb_s:.2f} GB/s, read {speed.read_gb_s:.2f} GB/s, one thread; {native.backend()}"
    )


@app.command()
def fetch(
    old: Old = None,
    new: New = None,
    data: DataName = "cold",
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Bytes that each of two nodes fetches of one update, for three ways to lay out the model over them."""
    from vllm_delta_sync.bench import fetch as measurement

    nodes = measurement.measure(*checkpoints(old, new, data, cache))
    if json:
        output.print_json({"nodes": [asdict(node) for node in nodes]})
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"an update of {nodes[0].update:,} bytes")
    for node in nodes:
        console.print(
            f"{node.layout:18} node {node.node}: {node.fetched:12,} bytes, {node.fetched / node.needed:.3f} of what it "
            f"needs, {node.fetched / node.update:.3f} of all"
        )


@app.command("catch-up")
def catch_up(
    power: schedule_options.Power = FOLDS.base,
    levels: schedule_options.Levels = FOLDS.levels,
    reach: schedule_options.Reach = FOLDS.reach,
    stride: schedule_options.Stride = FOLDS.stride,
    elements: Annotated[int, typer.Option(help="Of the synthetic model, about.", min=1000)] = 850_000,
    versions: Annotated[int, typer.Option(help="Of the synthetic walk.", min=2)] = 196,
    drift: Annotated[
        float, typer.Option(help="A gradient's mean beside its deviation of 1: what does not average out.")
    ] = 0.1,
    ctx: Annotated[bool, typer.Option(help="Whether versions are coded against the values before them.")] = True,
    behind: Annotated[list[int], typer.Option(help="Versions behind, for one row; may be given again.", min=1)] = [  # noqa: B006
        10,
        20,
        50,
        100,
        150,
    ],
    json: output.AsJson = False,
) -> None:
    """Bytes to catch up over the folds of a schedule, beside one fold of the whole way, from every start."""
    import tempfile

    from vllm_delta_sync.bench import catch_up as measurement
    from vllm_delta_sync.bench.codings import ADAPTIVE, CODINGS

    if max(behind) > versions:
        raise ConfigError(f"nobody can be {max(behind)} versions behind in a walk of {versions}; give more --versions")
    schedule = FoldSchedule(power, levels, reach, stride)
    with tempfile.TemporaryDirectory(prefix="vllm-delta-sync-") as directory:
        report = measurement.measure(
            Path(directory),
            schedule,
            elements=elements,
            versions=versions,
            behind=behind,
            drift=drift,
            coding=ADAPTIVE if ctx else CODINGS["gap"],
        )
    if json:
        output.print_json(asdict(report))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{report.changed:.2%} changed per version, {report.delta_bytes:,.0f} bytes; folds add "
        f"{report.fold_bytes / report.delta_bytes:.2f} times as many"
    )
    for way in report.ways:
        console.print(
            f"{way.behind:4} behind, {way.starts} starts: {way.worst:.3f} of one fold at worst, {way.mean:.3f} on "
            f"average; {way.hops} hops, {way.objects} objects at most"
        )
