"""`vllm-delta-sync verify`: is every byte of a log what it should be?

Does not repair.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log import verify as checks


def verify(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Check every digest, block and state root of a log. Exits with 1 when anything is wrong."""
    log = DeltaLog.open(uri, run)
    with output.progress() as show:
        verdict = checks.verify(log, progress=show)
    if json:
        output.print_json({"run": log.run, "ok": not verdict.faults, **asdict(verdict)})
    else:
        console = Console(soft_wrap=True, highlight=False)
        for fault in verdict.faults:
            text = output.printable(f"version {fault.version}: {fault.cause}: {fault.message}")
            console.print(text, style="red", markup=False)
        kept = f"{verdict.versions} versions, {verdict.blocks} blocks, {output.size(verdict.bytes)}"
        console.print(f"run {log.run}: {kept}: " + (f"{len(verdict.faults)} faults" if verdict.faults else "all well"))
    if verdict.faults:
        raise typer.Exit(1)
