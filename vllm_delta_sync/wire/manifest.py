"""The JSON objects of the log: LATEST and manifests, as frozen models that refuse what breaks docs/protocol.md.

Does not fetch what they refer to.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import canonical_json, shard, table
from vllm_delta_sync.wire.keys import check_key

FORMAT = shard.FORMAT
MAX_SHARDS = 4096
MAX_FILE_BYTES = 1 << 40  # of an anchor
MAX_METADATA_BYTES = 16 << 10
MAX_VERSION = 10**18
MAX_STEP = 1 << 62  # either sign
MAX_TABLE_BYTES = table.MAX_RAW_BYTES + (1 << 20)  # zstd never grows a table by more

Key = Annotated[str, AfterValidator(check_key)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
ContentId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Run = Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Model = TypeVar("_Model", bound="Wire")


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json.dump(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls: type[_Model], data: bytes, key: str) -> _Model:
        """Read the object stored under `key`; raises MalformedObject naming the key and the first wrong field."""
        canonical_json.parse(data, key)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:120] or "the object"
            raise MalformedObject(f"{key}: {where}: {first['msg'][:300]}") from None


class Found(Wire):
    """What leads to an object: its key relative to the run, SHA-256 (hex) and size in bytes.

    `content` is the id by which its store can fetch the bytes without looking the key up (a Xet hash); null where the
    store has none. It is a hint: what it fetches is verified like everything else.
    """

    key: Key
    sha256: Sha256
    size: Count
    content: ContentId | None = None


class ObjectRef(Found):
    """A manifest or a catalog, as JSON."""

    size: Annotated[int, Field(ge=2, le=canonical_json.MAX_BYTES)]


class TableRef(Wire):
    """The compressed table inside the first shard: `start` from the file's beginning, `size` in bytes, SHA-256."""

    start: Annotated[int, Field(ge=8, le=shard.MAX_BYTES)]
    size: Annotated[int, Field(ge=1, le=MAX_TABLE_BYTES)]
    sha256: Sha256


class ShardRef(Found):
    """A shard. `data_start`: byte offset in it where the blob of blocks begins."""

    size: Annotated[int, Field(ge=8, le=shard.MAX_BYTES)]
    data_start: Annotated[int, Field(ge=8)]

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if self.data_start > self.size:
            raise ValueError(f"data_start {self.data_start} is beyond the {self.size} bytes of {self.key}")
        return self


Shards = Annotated[tuple[ShardRef, ...], Field(min_length=1, max_length=MAX_SHARDS)]


class AnchorFile(Found):
    """One file of an anchor; its key begins with the anchor's prefix."""

    size: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]


class AnchorRef(Wire):
    """A full Hugging Face checkpoint in the run."""

    prefix: Key
    files: Annotated[tuple[AnchorFile, ...], Field(min_length=1, max_length=MAX_SHARDS)]

    @model_validator(mode="after")
    def _below(self) -> Self:
        for file in self.files:
            name = file.key.removeprefix(self.prefix + "/")
            if name == file.key or "/" in name:
                raise ValueError(f"{file.key} is not a file directly below {self.prefix}")
        if len({file.key for file in self.files}) != len(self.files):
            raise ValueError("two of its files have the same key")
        return self


class BaseRef(Wire):
    """How others find the base checkpoint: a Hub model id or a local path, and its revision."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    revision: Annotated[str, Field(max_length=256)] | None = None


class Totals(Wire):
    """Of the whole model: number of tensors and elements, elements changed, and bytes of the shards."""

    tensors: Count
    elements: Count
    changed: Count
    bytes: Count


def check_payload(table: TableRef, shards: tuple[ShardRef, ...], totals: Totals) -> None:
    """Raise ValueError unless the table ends where the blocks of the first shard begin and the totals add up."""
    end = table.start + table.size
    if end != shards[0].data_start:
        raise ValueError(f"the table ends at byte {end}, but the blocks begin at {shards[0].data_start}")
    stored = sum(part.size for part in shards)
    if totals.bytes != stored:
        raise ValueError(f"totals.bytes is {totals.bytes}, but the shards have {stored}")
    if totals.changed > totals.elements:
        raise ValueError(f"{totals.changed} of {totals.elements} elements changed")
    if len({part.key for part in shards}) != len(shards):
        raise ValueError("two of its objects have the same key")


class LatestPointer(Wire):
    """LATEST: the tip's manifest, version 0's, and the catalog. `sequence` grows by one at each write.

    While `pin` is a version, followers go to that one instead of the tip.
    """

    format: Literal["vllm-delta-sync/1"] = "vllm-delta-sync/1"
    run: Run
    sequence: Count
    version: Version
    manifest: ObjectRef
    base: ObjectRef
    catalog: ObjectRef | None = None
    pin: Version | None = None

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.pin is not None and self.pin > self.version:
            raise ValueError(f"pinned to version {self.pin}, but the tip is {self.version}")
        if self.version == 0 and self.manifest != self.base:
            raise ValueError("version 0 is the base")
        return self

    @property
    def goal(self) -> int:
        """The version that followers go to."""
        return self.version if self.pin is None else self.pin


class Manifest(Wire):
    """One version: its parent, shards, table and state root. Field by field in docs/protocol.md, *Manifest*."""

    format: Literal["vllm-delta-sync/1"] = "vllm-delta-sync/1"
    run: Run
    version: Version
    kind: Literal["base", "delta"]
    parent: ObjectRef | None
    created: FiniteFloat
    step: Annotated[int, Field(ge=-MAX_STEP, le=MAX_STEP)] | None
    metadata: dict[str, str]
    base: BaseRef | None
    anchor: AnchorRef | None
    totals: Totals
    shards: Shards
    table: TableRef
    state_root: Sha256

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_base = self.kind == "base"
        if is_base != (self.version == 0) or is_base != (self.parent is None):
            raise ValueError(
                f"kind {self.kind} with version {self.version}: only version 0 is a base, and has no parent"
            )
        if is_base and self.totals.changed:
            raise ValueError("a base has no changes")
        if not is_base and self.base is not None:
            raise ValueError("only version 0 names a base")
        check_payload(self.table, self.shards, self.totals)
        if len(canonical_json.dump(self.metadata)) > MAX_METADATA_BYTES:
            raise ValueError(f"metadata is larger than {MAX_METADATA_BYTES} bytes")
        return self
