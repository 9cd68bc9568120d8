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
MAX_METADATA_BYTES = 16 << 10
MAX_VERSION = 10**18
MAX_STEP = 1 << 62  # either sign
MAX_TABLE_BYTES = table.MAX_RAW_BYTES + (1 << 20)  # zstd never grows a table by more

Key = Annotated[str, AfterValidator(check_key)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Run = Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Model = TypeVar("_Model", bound="_Wire")


class _Wire(BaseModel):
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


class ObjectRef(_Wire):
    """A key relative to the run, and the SHA-256 (hex) of the object there."""

    key: Key
    sha256: Sha256


class TableRef(ObjectRef):
    """The compressed table. `size` in bytes."""

    size: Annotated[int, Field(ge=1, le=MAX_TABLE_BYTES)]


class ShardRef(ObjectRef):
    """A shard. `size` in bytes; `data_start`: byte offset in it where the blob of blocks begins."""

    size: Annotated[int, Field(ge=1, le=shard.MAX_BYTES)]
    data_start: Annotated[int, Field(ge=8)]

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if self.data_start > self.size:
            raise ValueError(f"data_start {self.data_start} is beyond the {self.size} bytes of {self.key}")
        return self


class AnchorFile(ObjectRef):
    """One file of an anchor; its key begins with the anchor's prefix. `size` in bytes."""

    size: Count


class AnchorRef(_Wire):
    """A full Hugging Face checkpoint in the run."""

    prefix: Key
    files: Annotated[tuple[AnchorFile, ...], Field(min_length=1, max_length=MAX_SHARDS)]

    @model_validator(mode="after")
    def _below(self) -> Self:
        for file in self.files:
            name = file.key.removeprefix(self.prefix + "/")
            if name == file.key or "/" in name:
                raise ValueError(f"{file.key} is not a file directly below {self.prefix}")
        return self


class BaseRef(_Wire):
    """How others find the base checkpoint: a Hub model id or a local path, and its revision."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    revision: Annotated[str, Field(max_length=256)] | None = None


class Totals(_Wire):
    """Of the whole model: number of tensors and elements, elements changed, and bytes of shards and table."""

    tensors: Count
    elements: Count
    changed: Count
    bytes: Count


class LatestPointer(_Wire):
    """LATEST: the key and digest of the tip's manifest. `sequence` grows by one at each write."""

    format: Literal["vllm-delta-sync/1"] = "vllm-delta-sync/1"
    manifest: Key
    run: Run
    sequence: Count
    sha256: Sha256
    version: Version

    @property
    def ref(self) -> ObjectRef:
        """The manifest it points to."""
        return ObjectRef(key=self.manifest, sha256=self.sha256)


class Manifest(_Wire):
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
    shards: Annotated[tuple[ShardRef, ...], Field(max_length=MAX_SHARDS)]
    table: TableRef
    state_root: Sha256

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_base = self.kind == "base"
        if is_base != (self.version == 0) or is_base != (self.parent is None):
            raise ValueError(
                f"kind {self.kind} with version {self.version}: only version 0 is a base, and has no parent"
            )
        if is_base and (self.shards or self.totals.changed):
            raise ValueError("a base has no shards and no changes")
        if not is_base and self.base is not None:
            raise ValueError("only version 0 names a base")
        stored = sum(part.size for part in self.shards) + self.table.size
        if self.totals.bytes != stored:
            raise ValueError(f"totals.bytes is {self.totals.bytes}, but shards and table have {stored}")
        if self.totals.changed > self.totals.elements:
            raise ValueError(f"{self.totals.changed} of {self.totals.elements} elements changed")
        keys = [self.table.key, *(part.key for part in self.shards)]
        if len(set(keys)) != len(keys):
            raise ValueError("two of its objects have the same key")
        if len(canonical_json.dump(self.metadata)) > MAX_METADATA_BYTES:
            raise ValueError(f"metadata is larger than {MAX_METADATA_BYTES} bytes")
        return self
