"""`vllm-delta-sync export`: a version of a log as a checkpoint that anything loads.

Does not upload it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.export import export as write


def export(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist, or be empty.")],
    version: Annotated[int | None, typer.Option(help="The version to write; the latest when left out.", min=0)] = None,
    base: Annotated[
        Path | None, typer.Option(help="Directory of the base checkpoint; the run's own anchor when left out.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Write a version as an ordinary Hugging Face checkpoint, proven by its state hash."""
    log = DeltaLog.open(uri, run)
    chosen = log.tip().version if version is None else version
    with output.progress() as show:
        files = write(log, chosen, out, base, progress=show)
    total = sum(path.stat().st_size for path in files)
    if json:
        output.print_json(
            {"run": log.run, "version": chosen, "out": str(out), "files": [path.name for path in files], "bytes": total}
        )
    else:
        typer.echo(f"version {chosen}: {len(files)} files, {output.size(total)} in {out}")
