"""What ranks and controller say to each other, out of band: a closed set of frozen messages.

Does not write or move them (`framing` and `channel` do), and does not decide anything (`controller` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef

Lanes = NDArray[np.uint32]


@dataclass(frozen=True)
class Place:
    """A version of the run: its manifest and its state root."""

    version: int
    ref: ObjectRef
    root: str


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
    """LATEST says something new: another version, pin, catalog or run."""

    kind = "tip"
    pointer: LatestPointer


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
    """The live weights are those of `place`; `text` says what differs when they are of no version of this run.

    `lanes`, uint32 [tensors, 4], are the hashes of every tensor, also of those that no rank holds.
    """

    kind = "located"
    place: Place | None
    lanes: Lanes
    text: str


@dataclass(frozen=True)
class Planned(Message):
    """The next step of the quickest way to the goal."""

    kind = "planned"
    hop: Hop


# --- controller → ranks ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LoadBase(Message):
    """Read the tensor table of version 0 of this run."""

    kind = "load_base"
    run: str
    base: ObjectRef


@dataclass(frozen=True)
class Prove(Message):
    """Hash every region of live memory in the background."""

    kind = "prove"


@dataclass(frozen=True)
class Locate(Message):
    """To the leader: which version has these tensor hashes, uint32 [tensors, 4]? Rows of `skip` are not judged."""

    kind = "locate"
    pointer: LatestPointer
    lanes: Lanes
    skip: tuple[int, ...]


@dataclass(frozen=True)
class Joined(Message):
    """Live weights are proven to have these tensor hashes, uint32 [tensors, 4], which are those of `place`.

    No place: they are of no version of the run, and only an anchor leads on from them.
    """

    kind = "joined"
    place: Place | None
    lanes: Lanes


@dataclass(frozen=True)
class Plan(Message):
    """To the leader: what is the next step from what is held (None: from weights of no version) to LATEST's goal?

    `failed` is the step taken last if it could not be: another way is to be taken while there is one. `too_large`: it
    changes more than may wait in memory; else it cannot be read or is damaged.
    """

    kind = "plan"
    pointer: LatestPointer
    held: Place | None
    failed: Hop | None
    too_large: bool


@dataclass(frozen=True)
class Stage(Message):
    """Fetch, verify, decode and map this step."""

    kind = "stage"
    hop: Hop


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
    """The base table is at hand. `traced`: it lists the very tensors whose layout this rank has traced before."""

    kind = "base_loaded"
    traced: bool


@dataclass(frozen=True)
class Proved(Message):
    """Full-pass lanes, uint32 [regions, 4]."""

    kind = "proved"
    lanes: Lanes
    seconds: float


@dataclass(frozen=True)
class Holding(Message):
    """The rank keeps its books for that version (None: of no version) from now on."""

    kind = "holding"
    place: Place | None


@dataclass(frozen=True)
class Staged(Message):
    """A step to a version waits in memory.

    `regions` and `lanes` (uint32 [len(regions), 4]) give the version's effect on the hash of each region touched;
    `tensors` and `effects` the effect that the log's tables promise, per tensor (index into version 0's table).
    `changed` counts the elements of the whole model that differ; for an anchor, those that this rank would write.
    """

    kind = "staged"
    version: int
    regions: tuple[int, ...]
    lanes: Lanes
    tensors: tuple[int, ...]
    effects: Lanes
    fetched_bytes: int  # from the store, by this rank
    cached_bytes: int  # from the node's cache
    cache_failure: str | None  # why the cache was given up, if it was
    changed: int
    step: int | None  # the trainer's own step number
    fetch_seconds: float
    stage_seconds: float


@dataclass(frozen=True)
class Audited(Message):
    """A full pass ended at `version`: names of tensors whose live bits are not what the running hash says."""

    kind = "audited"
    number: int
    version: int | None
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
    patience_s: float = 0.0  # for which the store asked before it is tried again


@dataclass(frozen=True)
class Lost(Message):
    """Made by the controller's own end: the rank's connection is gone."""

    kind = "lost"
    text: str
