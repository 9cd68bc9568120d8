"""How long work on a log reports where it is.

Does not draw anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]  # (what is being done, units done, units in all)


def silent(what: str, done: int, total: int) -> None:
    """Reports to nobody."""
