"""`vllm-delta-sync anchor`: a version of a log as a full checkpoint in its bucket.

Does not delete what it makes unnecessary: `gc` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.amend import amend
from vllm_delta_sync.log.anchoring import with_anchors, write_anchor
from vllm_delta_sync.log.schedule import prune


def anchor(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    version: Annotated[int | None, typer.Option(help="The version to write; the latest when left out.", min=1)] = None,
    base: Annotated[
        Path | None, typer.Option(help="Directory of the base checkpoint; the run's own anchors when left out.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Write a version into the bucket as an ordinary checkpoint, from which followers and `vllm serve` can begin."""
    log = DeltaLog.open(uri, run)
    chosen = log.latest().version if version is None else version
    with output.progress() as show:
        made = write_anchor(log, chosen, base, progress=show)
    amend(log, lambda catalog, at: prune(with_anchors(catalog, [made]), at.version, at.pin))
    place = f"{log.store.uri}/{made.checkpoint.prefix}"
    if json:
        files = [file.key.rpartition("/")[2] for file in made.checkpoint.files]
        output.print_json({"run": log.run, "version": chosen, "at": place, "files": files, "bytes": made.bytes})
    else:
        typer.echo(f"version {chosen}: {len(made.checkpoint.files)} files, {output.size(made.bytes)} in {place}")
