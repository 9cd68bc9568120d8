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
from vllm_delta_sync.cli import output
from vllm_delta_sync.errors import ConfigError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Measure this machine."
)

Old = Annotated[
    Path | None, typer.Argument(help="Directory of the older checkpoint; a real step of SmolLM2 when left out.")
]
New = Annotated[Path | None, typer.Argument(help="Directory of the newer checkpoint.")]
Cache = Annotated[Path, typer.Option(help="Folder in which that step is trained once and kept.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns; the median counts.")]


def _checkpoints(old: Path | None, new: Path | None, cache: Path) -> tuple[Path, Path]:
    if old is not None and new is not None:
        return old, new
    if old is not None:
        raise ConfigError("give both checkpoints, OLD and NEW, or neither")
    from vllm_delta_sync.demo.steps import real_step

    return real_step(cache.absolute())


@app.command()
def apply(
    old: Old = None,
    new: New = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each contender.")] = 1,
    rounds: Rounds = 9,
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Time to write one update into live weights: ours, torch's index_copy_, vLLM's own sparse patching."""
    from vllm_delta_sync.bench import apply as measurement

    times = measurement.measure(*_checkpoints(old, new, cache), threads=threads, rounds=rounds)
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
    rounds: Rounds = 9,
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Speed of a full pass of the state hash over a checkpoint, beside that of reading the same memory."""
    from vllm_delta_sync.bench import hash as measurement

    speed = measurement.measure(_checkpoints(old, new, cache)[1], rounds=rounds)
    if json:
        output.print_json(asdict(speed))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"state hash {speed.hash_gb_s:.2f} GB/s, read {speed.read_gb_s:.2f} GB/s, one thread; {native.backend()}"
    )
