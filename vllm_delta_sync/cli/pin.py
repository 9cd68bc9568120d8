"""`vllm-delta-sync pin` and `unpin`: every follower goes to a version and stays there, or follows the tip again.

Does not wait for the followers: their status says where they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog, pinning


def pin(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    version: Annotated[int, typer.Option(help="The version that followers go to, also backwards.", min=0)],
    base: Annotated[
        Path | None,
        typer.Option(help="Directory of the base checkpoint; needed only when the way back cannot be composed."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Make every follower go to a version and stay there, until `unpin`."""
    log = DeltaLog.open(uri, run)
    with output.progress() as show:
        found = pinning.pin(log, version, base, progress=show)
    size = sum(fold.totals.bytes for fold in found.folds)
    if json:
        sources = [fold.source for fold in found.folds]
        output.print_json(
            {"run": log.run, "pin": version, "tip": found.pointer.version, "folds_from": sources, "bytes": size}
        )
        return
    folds = f"; {len(found.folds)} folds written, {output.size(size)}" if found.folds else ""
    typer.echo(f"run {log.run}: followers go to version {version}; the tip is {found.pointer.version}{folds}")


def unpin(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Let followers go to the tip again."""
    log = DeltaLog.open(uri, run)
    pointer = pinning.unpin(log)
    if json:
        output.print_json({"run": log.run, "pin": pointer.pin, "tip": pointer.version})
    else:
        typer.echo(f"run {log.run}: followers go to the tip, version {pointer.version}")
