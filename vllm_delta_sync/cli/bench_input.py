"""What the measurements are given: two checkpoints of the user's, or one of the updates made for the purpose.

Does not measure anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_sync.errors import ConfigError

Old = Annotated[
    Path | None, typer.Argument(help="Directory of the older checkpoint; without it, --data says what is measured.")
]
New = Annotated[Path | None, typer.Argument(help="Directory of the newer checkpoint.")]
DataName = Annotated[
    str,
    typer.Option(
        "--data",
        help="Which update of SmolLM2-135M: a real step whose master weights began at the bf16 ones (cold) or anywhere "
        "inside their rounding cells (warm), or a synthetic one of 0.1 % (sparse) or 20 % (dense) of the elements.",
    ),
]
Cache = Annotated[Path, typer.Option(help="Folder in which that update is made once and kept.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns; the median counts.")]


def checkpoints(old: Path | None, new: Path | None, data: str, cache: Path) -> tuple[Path, Path]:
    """Directories of the older and the newer checkpoint; raises ConfigError for one alone, or an unknown `data`."""
    if old is not None and new is not None:
        return old, new
    if old is not None:
        raise ConfigError("give both checkpoints, OLD and NEW, or neither")
    from vllm_delta_sync.bench.data import made

    return made(data, cache.absolute())
