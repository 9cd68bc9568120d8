"""`vllm-delta-sync gc`: what of a run no reader needs any more, and why; deleted only with --delete.

Does not touch other runs of the bucket, nor objects that are not a log's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog, collection
from vllm_delta_sync.log.plan import ranges
from vllm_delta_sync.log.retention import GOES, Sorted

_VERSION = re.compile(r"(?:versions|anchors)/(\d{20})/")
_FOLD = re.compile(r"folds/(\d{20})-(\d{20})/")
_MOST = 6  # folds named in a cell


def gc(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    keep_versions: Annotated[
        int | None,
        typer.Option(help="How many of the newest versions keep their deltas, at least; all when left out.", min=0),
    ] = None,
    keep_anchors: Annotated[int, typer.Option(help="How many of the newest anchors stay, at least.", min=0)] = 2,
    grace_hours: Annotated[
        float, typer.Option(help="Age from which an object that nothing leads to is a leftover.", min=0)
    ] = 24.0,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; without, it is only shown.")] = False,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Show what no reader needs any more, and why; delete it with --delete."""
    log = DeltaLog.open(uri, run)
    with output.progress() as show:
        found = collection.collect(
            log,
            keep_versions=keep_versions,
            keep_anchors=keep_anchors,
            grace=3600 * grace_hours,
            delete=delete,
            progress=show,
        )
    shown = [one for one in found.objects if one.fate != "needed"]
    if json:
        objects = [{"key": one.key, "fate": one.fate, "why": one.why, "goes": one.fate in GOES} for one in shown]
        before, oldest = found.before, found.oldest
        output.print_json(
            {"run": log.run, "oldest_before": before, "oldest": oldest, "objects": objects, "deleted": found.deleted}
        )
        return
    if shown:
        output.console().print(_grid(shown))
    moved = f", deltas now begin after version {found.oldest}" if found.oldest != found.before else ""
    done = f"{found.deleted} deleted" if delete else f"{len(found.going)} would go (delete them with --delete)"
    typer.echo(f"run {log.run}: {len(found.objects)} objects, {done}{moved}")


def _grid(shown: Sequence[Sorted]) -> Table:
    """A row for all objects of one kind that stay or go for the same reason."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for one in shown:
        groups.setdefault((one.key.partition("/")[0], one.why, one.fate in GOES), []).append(one.key)
    grid = Table("what", "which", "why", "goes")
    grid.add_column("objects", justify="right")
    for (top, why, goes), keys in sorted(groups.items()):
        cells = (top, _which(keys), why, "yes" if goes else "no", str(len(keys)))
        grid.add_row(*(Text(output.printable(cell)) for cell in cells))
    return grid


def _which(keys: Sequence[str]) -> str:
    """The versions that the keys are of, as far as they say; pairs of them for folds."""
    folds = {match.groups() for key in keys if (match := _FOLD.match(key))}
    pairs = [f"{int(source)}→{int(to)}" for source, to in sorted(folds)]
    versions = {int(match[1]) for key in keys if (match := _VERSION.match(key))}
    shown = ", ".join(pairs[:_MOST]) + (", …" if len(pairs) > _MOST else "")
    return ranges(versions) if versions else shown
