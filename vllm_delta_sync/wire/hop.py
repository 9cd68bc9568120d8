"""One step through a run, whatever it is made of: a delta, a fold or an anchor, as a model that messages can carry.

Does not fetch anything, and does not say which step to take: `log.plan` does.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vllm_delta_sync.wire.catalog import Fold
from vllm_delta_sync.wire.manifest import (
    MAX_STEP,
    AnchorRef,
    Found,
    Manifest,
    ObjectRef,
    Sha256,
    ShardRef,
    TableRef,
    Totals,
    Version,
    Wire,
)
from vllm_delta_sync.wire.payload import parts_of


class Hop(Wire):
    """From version `source` (null for an anchor: from anywhere) to version `to`, whose manifest is `target`.

    A delta states its parent by digest, a fold the state root it begins at. The state root at the end is `after`.
    `table` and `shards` are of a delta or a fold; `checkpoint` and its `states` (all tensors' hashes) of an anchor. The
    anchor that version 0 brings with it has no `states`: its hashes are version 0's table.
    """

    kind: Literal["delta", "fold", "anchor"]
    source: Version | None
    to: Version
    target: ObjectRef
    parent: ObjectRef | None = None
    before: Sha256 | None = None
    after: Sha256
    table: TableRef | None = None
    shards: tuple[ShardRef, ...] = ()
    totals: Totals | None = None
    checkpoint: AnchorRef | None = None
    states: Found | None = None
    step: Annotated[int, Field(ge=-MAX_STEP, le=MAX_STEP)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_anchor = self.kind == "anchor"
        if is_anchor != (self.source is None) or is_anchor != (self.checkpoint is not None):
            raise ValueError(f"a hop of kind {self.kind} from version {self.source} with such contents")
        if (self.states is not None) != (is_anchor and self.to > 0):
            raise ValueError(
                f"a hop of kind {self.kind} to version {self.to} that states its hashes in the wrong place"
            )
        if not is_anchor and (self.table is None or not self.shards or self.totals is None):
            raise ValueError(f"a {self.kind} without table, shards or totals")
        if (self.kind == "delta") != (self.parent is not None) or (self.kind == "fold") != (self.before is not None):
            raise ValueError(f"a {self.kind} that does not say rightly what it follows")
        return self

    @classmethod
    def over(cls, payload: Manifest | Fold, target: ObjectRef) -> Self:
        """By a delta or a fold; `target` leads to the manifest of the version at its end, a delta's own."""
        parts = parts_of(payload)
        own = payload if isinstance(payload, Manifest) else None
        return cls(
            kind="fold" if parts.is_fold else "delta",
            source=parts.source,
            to=parts.to,
            target=target,
            parent=None if own is None else own.parent,
            before=parts.before,
            after=parts.after,
            table=parts.table,
            shards=parts.shards,
            totals=parts.totals,
            step=None if own is None else own.step,
        )

    @classmethod
    def onto(cls, version: Manifest, target: ObjectRef, checkpoint: AnchorRef, states: Found | None) -> Self:
        """By a full checkpoint of a version, whose manifest `target` leads to; `states` is None for version 0."""
        return cls(
            kind="anchor",
            source=None,
            to=version.version,
            target=target,
            after=version.state_root,
            checkpoint=checkpoint,
            states=states,
            step=version.step,
        )

    @property
    def bytes(self) -> int:
        """What fetching all of it costs."""
        parts = self.shards if self.checkpoint is None else self.checkpoint.files
        return sum(part.size for part in parts) + (self.states.size if self.states else 0)
