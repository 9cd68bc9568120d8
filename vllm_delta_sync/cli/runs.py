"""`vllm-delta-sync runs`: the runs of a bucket, the newest first.

Does not read their versions: `log --run` does.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import history
from vllm_delta_sync.store import open_store


def runs(
    uri: Annotated[str, typer.Argument(help="The bucket: a URI or a path.")],
    json: output.AsJson = False,
) -> None:
    """Show the runs of a bucket, the newest first, and which one followers take."""
    found = history.runs(open_store(uri))
    now = time.time()
    if json:
        output.print_json({"uri": uri, "runs": [_row(run, now) for run in found]})
        return
    grid = Table("run", "")
    for name in ("version", "pinned to", "began", "latest"):
        grid.add_column(name, justify="right")
    grid.add_column("base")
    for run in found:
        row = _row(run, now)
        cells = [run.run, "current" if run.current else "", *(_cell(row[name]) for name in ("version", "pin"))]
        cells += [_age(row["began_s"]), _age(row["age_s"]), _cell(row["base"] if run.fault is None else run.fault)]
        grid.add_row(*(Text(output.printable(cell)) for cell in cells))
    output.console().print(grid)


def _row(run: history.Run, now: float) -> dict[str, object]:
    base = run.base.base if run.base is not None else None
    return {
        "run": run.run,
        "current": run.current,
        "version": run.pointer.version if run.pointer else None,
        "pin": run.pointer.pin if run.pointer else None,
        "began_s": round(now - run.base.created, 1) if run.base else None,
        "age_s": round(now - run.tip.created, 1) if run.tip else None,
        "base": base.model if base else None,
        "fault": run.fault,
    }


def _cell(value: object) -> str:
    return "–" if value is None else str(value)


def _age(value: object) -> str:
    return output.age(value) if isinstance(value, float) else "–"
