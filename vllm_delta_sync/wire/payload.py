"""What a version and a fold have in common: a table and blocks, that lead from one version to another.

Does not fetch or write them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire.catalog import Fold
from vllm_delta_sync.wire.manifest import Manifest, ShardRef, TableRef, Totals

if TYPE_CHECKING:
    from vllm_delta_sync.wire.hop import Hop

Payload: TypeAlias = "Manifest | Fold | Hop"


@dataclass(frozen=True, slots=True)
class Parts:
    """A payload, whatever it is stated by. `before` is the state root it begins at, None where only its parent says."""

    source: int
    to: int
    before: str | None
    after: str
    table: TableRef
    shards: tuple[ShardRef, ...]
    totals: Totals

    @property
    def is_base(self) -> bool:
        """Whether it is version 0, which has a table of the whole model and no blocks."""
        return self.to == self.source

    @property
    def is_fold(self) -> bool:
        """Whether it may skip versions or go back, so that its counts are of positions listed."""
        return self.before is not None

    def __str__(self) -> str:
        if self.is_fold:
            return f"the fold from version {self.source} to {self.to}"
        return f"version {self.to}"


def parts_of(payload: Payload) -> Parts:
    """The same for all kinds of payload; raises MalformedObject for an anchor, which has neither table nor blocks."""
    if isinstance(payload, Manifest):
        return Parts(
            source=max(0, payload.version - 1),
            to=payload.version,
            before=None,
            after=payload.state_root,
            table=payload.table,
            shards=payload.shards,
            totals=payload.totals,
        )
    if payload.source is None or payload.table is None or payload.totals is None:
        raise MalformedObject(f"version {payload.to} is reached by a checkpoint here, not by blocks")
    return Parts(
        source=payload.source,
        to=payload.to,
        before=payload.before,
        after=payload.after,
        table=payload.table,
        shards=payload.shards,
        totals=payload.totals,
    )
