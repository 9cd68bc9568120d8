"""`vllm-delta-sync fold`: all changes between two versions in one object, or the folds of a schedule.

Does not delete the deltas that it folds: `gc` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_sync.cli import output, schedule_options
from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.amend import amend
from vllm_delta_sync.log.folding import write_fold, write_scheduled
from vllm_delta_sync.log.schedule import FOLDS, FoldSchedule, with_folds
from vllm_delta_sync.wire.catalog import Fold


def fold(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    source: Annotated[int | None, typer.Option("--from", help="The version the fold begins at.", min=0)] = None,
    to: Annotated[int | None, typer.Option(help="The version it leads to, older or newer.", min=0)] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Write the folds of a schedule that are missing.")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Directory of the base checkpoint; needed only where changes do not say enough.")
    ] = None,
    first: Annotated[
        int | None, typer.Option(help="With --schedule: the oldest version at which folds end.", min=1)
    ] = None,
    power: schedule_options.Power = FOLDS.base,
    levels: schedule_options.Levels = FOLDS.levels,
    reach: schedule_options.Reach = FOLDS.reach,
    stride: schedule_options.Stride = FOLDS.stride,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: output.AsJson = False,
) -> None:
    """Fold the changes between two versions, or by a schedule, so that followers far behind take one hop."""
    if schedule == (source is not None or to is not None):
        raise ConfigError("give either --schedule or the ends of one fold, --from and --to")
    log = DeltaLog.open(uri, run)
    with output.progress() as show:
        if schedule:
            wanted = FoldSchedule(power, levels, reach, stride)
            made = write_scheduled(log, wanted, first, base, threads=threads, progress=show)
        else:
            if source is None or to is None or source == to:
                raise ConfigError("a fold needs both ends, --from and --to, and they must differ")
            made = [write_fold(log, source, to, base, threads=threads, progress=show)]
            amend(log, lambda catalog, _: with_folds(catalog, made))
    _report(log.run, made, json)


def _report(run: str, made: list[Fold], json: bool) -> None:
    if json:
        rows = [
            {"from": fold.source, "to": fold.to, "bytes": fold.totals.bytes, "changed": fold.totals.changed}
            for fold in made
        ]
        output.print_json({"run": run, "folds": rows})
        return
    for fold in made:
        share = fold.totals.changed / max(1, fold.totals.elements)
        typer.echo(f"{fold.source} to {fold.to}: {share:.2%} changed, {output.size(fold.totals.bytes)}")
    typer.echo(f"{len(made)} folds, {output.size(sum(fold.totals.bytes for fold in made))}")
