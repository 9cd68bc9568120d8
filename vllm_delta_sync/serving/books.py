"""What one rank knows of its weights: what they are, and what waits to be written.

Does not look at weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta_sync.serving.messages import Lanes, Place
from vllm_delta_sync.serving.staging import Effect
from vllm_delta_sync.wire.hop import Hop


@dataclass(frozen=True)
class Books:
    """What live memory holds: a version of the run (None: weights of no version), and the hash of every tensor."""

    place: Place | None
    hashes: Lanes  # uint32 [tensors, 4]


@dataclass(frozen=True)
class Staged:
    """A step that waits for its commit, or was committed and can be taken back."""

    hop: Hop
    before: Books
    after: Books
    effect: Effect
