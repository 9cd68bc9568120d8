"""`vllm-delta-sync bench curves`: what an update costs by how much it changes, as a table, JSON or charts.

Does not measure anything itself: `vllm_delta_sync.bench` does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vllm_delta_sync.cli import output
from vllm_delta_sync.cli.bench_input import Cache, Rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_delta_sync.bench.curves import Point

DENSITY_CHART, COMMIT_CHART = "bytes-by-density.svg", "commit-by-changes.svg"
MOST_BYTES = 16.0  # drawn: a dense copy of an update of 0.1 % takes 2,000 per change, beside which nothing can be seen


def curves(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Directory of a bf16 checkpoint; without it, that of the cold step.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help=f"Folder for the charts, {DENSITY_CHART} and {COMMIT_CHART}.")
    ] = None,
    rounds: Rounds = 5,
    cache: Cache = Path(".cache"),
    json: output.AsJson = False,
) -> None:
    """Bytes per change and commit time of updates that change from 0.05 % to 60 % of a model."""
    from vllm_delta_sync.bench import curves as measurement
    from vllm_delta_sync.bench.data import Data, made

    found = measurement.measure(checkpoint or made(Data.COLD, cache.absolute())[0], rounds)
    if plot is not None:
        _draw(found, plot)
    if json:
        output.print_json({"points": [asdict(point) for point in found]})
        return
    grid = Table("changed", "elements")
    for name in (*found[0].bytes_per_change, *found[0].commit_ms):
        grid.add_column(name, justify="right")
    for point in found:
        sizes = [f"{size:.3f} B" for size in point.bytes_per_change.values()]
        times = [f"{time:.2f} ms" for time in point.commit_ms.values()]
        grid.add_row(f"{point.density:.3%}", f"{point.changed:,}", *sizes, *times)
    output.console().print(grid)


def _draw(points: Sequence[Point], folder: Path) -> None:
    from vllm_delta_sync.bench.chart import line_chart

    sizes = {
        name: [(100 * point.density, point.bytes_per_change[name]) for point in points]
        for name in points[0].bytes_per_change
        if name != "adaptive"  # lies on the lowest of the others
    }
    times = {name: [(point.changed, point.commit_ms[name]) for point in points] for name in points[0].commit_ms}
    folder.mkdir(parents=True, exist_ok=True)
    sparse = {name: [(x, y) for x, y in line if y <= MOST_BYTES] for name, line in sizes.items()}
    (folder / DENSITY_CHART).write_text(
        line_chart("Bytes per changed element", "% of the elements that change", "bytes", sparse)
    )
    (folder / COMMIT_CHART).write_text(line_chart("Commit of one update", "changed elements", "ms", times))
