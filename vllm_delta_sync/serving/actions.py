"""What the controller has done by others, and what it is told: actions and events.

Plain data; `controller` decides, `loop` and `attached` carry out.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta_sync.serving.messages import Message
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire.tensors import TensorSpec


# --- actions: what the loop carries out ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Send:
    """To one rank, or to all."""

    message: Message
    rank: int | None = None


@dataclass(frozen=True)
class Trace:
    """On the engine thread: let every rank trace its model's loader."""

    attempt: int


@dataclass(frozen=True)
class Adopt:
    """On the engine thread: what is served is known from now on as `version` of `run`."""

    run: str
    version: int


@dataclass(frozen=True)
class Commit:
    """On the engine thread, between two steps: scatter `version` of `run` on every rank, or on none."""

    run: str
    version: int


@dataclass(frozen=True)
class Stop:
    """On the engine thread: stop the server (`on_error: stop`)."""

    text: str


Action = Send | Trace | Adopt | Commit | Stop


# --- events from the engine thread -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Traced:
    """Outcome of Trace: one layout per rank."""

    attempt: int
    specs: tuple[TensorSpec, ...]
    layouts: tuple[RankLayout, ...]


@dataclass(frozen=True)
class EngineFailed:
    """A Trace could not be carried out."""

    attempt: int
    cause: str
    text: str


@dataclass(frozen=True)
class Committed:
    """Outcome of Commit.

    `error` is None on success; `trusted` is False when the ranks could not be brought back to the version before.
    """

    version: int
    seconds: float  # the engine thread's pause, RPC included
    error: tuple[str, str] | None = None  # cause, text
    trusted: bool = True


@dataclass(frozen=True)
class Tick:
    """Time passes."""


Event = Message | Traced | EngineFailed | Committed | Tick
