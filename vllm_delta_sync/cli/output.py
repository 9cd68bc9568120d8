"""What commands share in how they speak: JSON and tables on stdout, progress on stderr, sizes for people.

Does not know any command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from vllm_delta_sync.log.progress import Progress

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def print_json(value: dict[str, object]) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def printable(text: str) -> str:
    """Text that may come from a hostile file, with every character escaped that would steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(count: float) -> str:
    """Bytes for people, in powers of 1000: `1.24 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def console() -> Console:
    """The console of stdout, wide enough for every table where that is no terminal that would say how wide it is."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=400)


def age(seconds: float) -> str:
    """A time span for people, in the largest unit of which there are two: `3 min`; one that is negative, `0 s`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar per kind of work on stderr; nothing when stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
