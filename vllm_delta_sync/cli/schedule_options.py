"""The options by which commands are told of a schedule of folds.

Does not hold defaults: `log.schedule` does.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Power: TypeAlias = Annotated[
    int, typer.Option(help="Folds end to end: of POWER, POWER², … POWER^LEVELS versions.", min=2)
]
Levels: TypeAlias = Annotated[int, typer.Option(help="How many lengths of folds end to end; 0: none.", min=0)]
Reach: TypeAlias = Annotated[int, typer.Option(help="Versions behind that a long fold nearly covers; 0: none.", min=0)]
Stride: TypeAlias = Annotated[int, typer.Option(help="Versions from one long fold to the next.", min=1)]
