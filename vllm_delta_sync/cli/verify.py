"""`vllm-delta-sync verify`: is every byte of a log what it should be?

Does not repair anything but LATEST, and that only with --repair-latest.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog, repair
from vllm_delta_sync.log import verify as checks


def verify(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    repair_latest: Annotated[
        bool,
        typer.Option("--repair-latest", help="First let LATEST name the newest version whose chain verifies."),
    ] = False,
    to: Annotated[
        str | None, typer.Option(help="With --repair-latest: the manifest to end at, where branches compete.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Check every digest, block and state root of a log. Exits with 1 when anything is wrong."""
    if to is not None and not repair_latest:
        raise typer.BadParameter("--to is for --repair-latest")
    log = DeltaLog.open(uri, run)
    with output.progress() as show:
        repaired = repair.repair_latest(log, to=to, progress=show) if repair_latest else None
        verdict = checks.verify(log, progress=show)
    if json:
        found: dict[str, object] = {"run": log.run, "ok": not verdict.faults, **asdict(verdict)}
        if repaired is not None:
            found["latest"] = {"version": repaired.pointer.version, "changed": repaired.changed}
        output.print_json(found)
    else:
        console = Console(soft_wrap=True, highlight=False)
        for fault in verdict.faults:
            text = output.printable(f"version {fault.version}: {fault.cause}: {fault.message}")
            console.print(text, style="red", markup=False)
        if repaired is not None:
            said = "names" if repaired.changed else "already named"
            console.print(
                f"LATEST {said} version {repaired.pointer.version}; "
                f"{repaired.sound} of {repaired.found} manifests found lead somewhere that verifies"
            )
        kept = (
            f"{verdict.versions} versions, {verdict.folds} folds, {verdict.anchors} anchors, {verdict.blocks} blocks, "
            f"{output.size(verdict.bytes)}"
        )
        console.print(f"run {log.run}: {kept}: " + (f"{len(verdict.faults)} faults" if verdict.faults else "all well"))
    if verdict.faults:
        raise typer.Exit(1)
