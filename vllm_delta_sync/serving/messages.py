"""What ranks and controller say to each other, out of band: a closed set of frozen messages and their byte form.

Does not move bytes (`channel` does) and does not decide anything (`controller` does). Lanes travel as base64 of
little-endian uint32; nothing is pickled.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire.manifest import ObjectRef

Lanes = NDArray[np.uint32]


@dataclass(frozen=True)
class Ref:
    """A manifest, by key and digest."""

    version: int
    key: str
    sha256: str

    def to_object(self) -> ObjectRef:
        """The same, as manifests refer to each other."""
        return ObjectRef(key=self.key, sha256=self.sha256)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages; `kind` names the class on the wire.

    `attempt` is the controller's number for what a command belongs to; a reply repeats it, so that a late answer to
    something given up is known as such.
    """

    kind: ClassVar[str] = ""
    attempt: int = 0


# --- leader → controller ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tip(Message):
    """The log's tip moved; `refs` are the manifests up to it that were not told before, ascending."""

    kind = "tip"
    run: str
    version: int
    refs: tuple[Ref, ...]


@dataclass(frozen=True)
class NothingPublished(Message):
    """The store answers, and holds no run yet."""

    kind = "nothing_published"


@dataclass(frozen=True)
class PollFailed(Message):
    """One poll failed; polling goes on."""

    kind = "poll_failed"
    cause: str
    text: str


@dataclass(frozen=True)
class Located(Message):
    """The live weights are those of `version`; `text` says what differs when it is None."""

    kind = "located"
    version: int | None
    text: str


# --- controller → ranks ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LoadBase(Message):
    """Read the tensor table of version 0."""

    kind = "load_base"
    run: str
    base: Ref


@dataclass(frozen=True)
class Prove(Message):
    """Hash every region of live memory in the background."""

    kind = "prove"


@dataclass(frozen=True)
class Locate(Message):
    """To the leader: which version has these tensor hashes? `lanes` is uint32 [tensors, 4]; rows of "
    "`skip` are not judged."""

    kind = "locate"
    refs: tuple[Ref, ...]
    lanes: Lanes
    skip: tuple[int, ...]


@dataclass(frozen=True)
class Joined(Message):
    """Live weights are proven to be those of `ref.version`."""

    kind = "joined"
    ref: Ref


@dataclass(frozen=True)
class Stage(Message):
    """Fetch, verify, decode and map this version."""

    kind = "stage"
    ref: Ref


@dataclass(frozen=True)
class Drop(Message):
    """Forget what is staged."""

    kind = "drop"


@dataclass(frozen=True)
class Audit(Message):
    """Hash every region again, in slices, while serving and committing go on."""

    kind = "audit"
    number: int


# --- rank → controller -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class BaseLoaded(Message):
    """The base table is at hand; the layout can be traced."""

    kind = "base_loaded"


@dataclass(frozen=True)
class Proved(Message):
    """Full-pass lanes, uint32 [regions, 4]."""

    kind = "proved"
    lanes: Lanes
    seconds: float


@dataclass(frozen=True)
class Holding(Message):
    """The rank keeps its books for that version from now on."""

    kind = "holding"
    version: int


@dataclass(frozen=True)
class Staged(Message):
    """A version waits in memory.

    `regions` and `lanes` (uint32 [len(regions), 4]) give the version's effect on the hash of each region touched;
    `tensors` and `effects` the effect that the log's tables promise, per tensor (index into version 0's table).
    """

    kind = "staged"
    version: int
    regions: tuple[int, ...]
    lanes: Lanes
    tensors: tuple[int, ...]
    effects: Lanes
    fetched_bytes: int
    changed: int  # elements changed in the whole model
    step: int | None  # the trainer's own step number
    fetch_seconds: float
    stage_seconds: float


@dataclass(frozen=True)
class Audited(Message):
    """A full pass ended at `version`: names of tensors whose live bits are not what the running hash says."""

    kind = "audited"
    number: int
    version: int
    wrong: tuple[str, ...]
    lanes: Lanes
    seconds: float


@dataclass(frozen=True)
class WantAudit(Message):
    """Someone asked this rank for a full pass of all ranks."""

    kind = "want_audit"


@dataclass(frozen=True)
class Failed(Message):
    """A command could not be carried out; nothing live was touched."""

    kind = "failed"
    command: str
    version: int | None
    cause: str
    text: str


@dataclass(frozen=True)
class Lost(Message):
    """Made by the controller's own end: the rank's connection is gone."""

    kind = "lost"
    text: str


_KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        Tip, NothingPublished, PollFailed, Located, LoadBase, Prove, Locate, Joined, Stage, Drop, Audit,
        BaseLoaded, Proved, Holding, Staged, Audited, WantAudit, Failed, Lost,
    )
}  # fmt: skip


def to_bytes(message: Message) -> bytes:
    """One message as JSON bytes."""
    body = {field.name: _plain(getattr(message, field.name)) for field in dataclasses.fields(message)}
    return json.dumps({"kind": message.kind, **body}, separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Message:
    """Parse one message.

    Raises:
        MalformedObject: not JSON, an unknown kind, or fields that do not fit it.
    """
    try:
        body = json.loads(data)
        cls = _KINDS[body.pop("kind")]
        return cls(**{name: _typed(name, value) for name, value in body.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedObject(f"message between rank and engine cannot be read: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(value, dtype="<u4").tobytes()).decode()
    if isinstance(value, Ref):
        return [value.version, value.key, value.sha256]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _typed(name: str, value: Any) -> Any:
    if name in ("lanes", "effects"):
        return np.frombuffer(base64.b64decode(value), dtype="<u4").reshape(-1, 4).astype(np.uint32)
    if name in ("ref", "base"):
        return Ref(*value)
    if name == "refs":
        return tuple(Ref(*item) for item in value)
    if isinstance(value, list):
        return tuple(value)
    return value
