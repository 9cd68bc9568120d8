"""The catalog: the folds and anchors of a run, as a frozen model that refuses what breaks docs/protocol.md.

Does not choose between them: `log.plan` does.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vllm_delta_sync.wire.manifest import (
    AnchorRef,
    Found,
    ObjectRef,
    Run,
    Sha256,
    Shards,
    TableRef,
    Totals,
    Version,
    Wire,
    check_payload,
)

MAX_ENTRIES = 4096


class Fold(Wire):
    """All changes from one version to another in one hop; `to` is the smaller one where a pin goes back.

    `before` and `after` are the state roots at both ends, `manifest` is that of version `to`.
    """

    source: Version
    to: Version
    before: Sha256
    after: Sha256
    manifest: ObjectRef
    table: TableRef
    shards: Shards
    totals: Totals

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.source == self.to:
            raise ValueError(f"a fold from version {self.source} to itself")
        check_payload(self.table, self.shards, self.totals)
        return self


class Anchor(Wire):
    """A full checkpoint of a version; `table` lists every tensor with its state hash there, like version 0's."""

    version: Version
    state_root: Sha256
    manifest: ObjectRef
    checkpoint: AnchorRef
    table: Found
    bytes: Annotated[int, Field(ge=0, le=1 << 62)]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        stored = sum(file.size for file in self.checkpoint.files)
        if self.bytes != stored:
            raise ValueError(f"bytes is {self.bytes}, but the files have {stored}")
        return self


class Catalog(Wire):
    """What leads through a run besides its deltas. Deltas of versions up to `oldest` may be gone."""

    format: Literal["vllm-delta-sync/1"] = "vllm-delta-sync/1"
    run: Run
    oldest: Version = 0
    folds: Annotated[tuple[Fold, ...], Field(max_length=MAX_ENTRIES)] = ()
    anchors: Annotated[tuple[Anchor, ...], Field(max_length=MAX_ENTRIES)] = ()
