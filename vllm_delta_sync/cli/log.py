"""`vllm-delta-sync log`: the versions of a run, the newest first.

Does not verify blocks: `verify` does.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vllm_delta_sync.cli import output
from vllm_delta_sync.log import DeltaLog, history
from vllm_delta_sync.wire.manifest import LatestPointer


def log(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    limit: Annotated[int, typer.Option(help="How many versions to show, at most; 0 for all.", min=0)] = 20,
    run: Annotated[
        str | None, typer.Option(help="Id of the run; the current one when left out (`runs` lists them).")
    ] = None,
    json: output.AsJson = False,
) -> None:
    """Show the versions of a run, the newest first."""
    opened = DeltaLog.open(uri, run)
    pointer = opened.latest()
    entries = list(history.entries(opened, pointer, limit or None))
    now = time.time()
    if json:
        oldest = opened.catalog(pointer).oldest
        head = {"run": opened.run, "tip": pointer.version, "pin": pointer.pin, "oldest": oldest}
        output.print_json({**head, "versions": [_row(entry, now) for entry in entries]})
        return
    console = output.console()
    console.print(_title(opened, pointer), markup=False, highlight=False, soft_wrap=True)
    console.print(_grid(entries, now))


def _row(entry: history.Entry, now: float) -> dict[str, object]:
    manifest = entry.manifest
    return {
        "version": manifest.version,
        "age_s": round(now - manifest.created, 1),
        "changed": manifest.totals.changed,
        "changed_percent": round(entry.changed_percent, 4),
        "bytes": manifest.totals.bytes,
        "codecs": {name: round(share, 4) for name, share in entry.codecs},
        "step": manifest.step,
        "metadata": manifest.metadata,
        "anchor": entry.anchor,
        "folds_from": list(entry.folds_from),
    }


def _title(opened: DeltaLog, pointer: LatestPointer) -> str:
    pin = "" if pointer.pin is None else f", pinned to {pointer.pin}"
    catalog = opened.catalog(pointer)
    gone = f", deltas up to {catalog.oldest} let go" if catalog.oldest else ""
    kept = f"{len(catalog.folds)} folds, {len(catalog.anchors)} anchors"
    return f"run {opened.run}: version {pointer.version}{pin}; {kept}{gone}"


def _grid(entries: list[history.Entry], now: float) -> Table:
    grid = Table()
    for name in ("version", "age", "changed %", "bytes"):
        grid.add_column(name, justify="right")
    grid.add_column("codec")
    grid.add_column("step", justify="right")
    grid.add_column("also")
    for entry in entries:
        manifest = entry.manifest
        codecs = ", ".join(name if share == 1 else f"{name} {share:.0%}" for name, share in entry.codecs)
        also = (["anchor"] if entry.anchor else []) + [f"fold from {source}" for source in entry.folds_from]
        cells = [
            str(manifest.version),
            output.age(now - manifest.created),
            f"{entry.changed_percent:.3g}",
            output.size(manifest.totals.bytes),
            codecs or "–",
            "–" if manifest.step is None else str(manifest.step),
            ", ".join(also),
        ]
        grid.add_row(*map(Text, cells))
    return grid
