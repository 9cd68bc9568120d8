"""How much memory publishing takes beyond the model, and staging and committing beside live weights.

Measures processes of their own, so that nothing else is counted; both run on the CPU. Does not load vLLM: the weights
are served by a module that holds each tensor of the checkpoint as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_sync.errors import DeltaSyncError


@dataclass(frozen=True, slots=True)
class PublishMemory:
    """Of a process that trains nothing and publishes one update of a model that it holds."""

    parameters: int
    changed: int  # elements
    model_bytes: int
    open_peak_bytes: int  # beyond the model while the base is read; pages of its files count
    held_bytes: int  # beyond the model, once the publisher is open
    publish_peak_bytes: int  # beyond those, from publish() until all is durable
    held_bytes_per_parameter: float
    publish_peak_bytes_per_change: float


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of a process that holds live weights and takes that update."""

    changed: int  # live elements
    held_bytes: int  # grown, once the update is committed: offsets, old and new values, which can undo it
    peak_bytes: int  # grown at most, fetch to commit; what is fetched at a time, and a decoded block, count
    held_bytes_per_change: float
    peak_bytes_per_change: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Both sides of one update."""

    publish: PublishMemory
    stage: StageMemory


def measure(old: Path, new: Path) -> dict[str, MemoryUse]:
    """Publish the step from one checkpoint to the other into a temporary log, and take it: with `ctx`, and without.

    Raises:
        DeltaSyncError: one of the processes failed; what it said is in the message.
    """
    return {coding: _measure(old, new, coding) for coding in ("ctx", "gap")}


def _measure(old: Path, new: Path, coding: str) -> MemoryUse:
    with tempfile.TemporaryDirectory() as bucket:
        published = _run("publish", bucket, old, new, coding)
        staged = _run("stage", bucket, old)
    return MemoryUse(PublishMemory(**published), StageMemory(**staged))


def _run(*arguments: str | Path) -> dict[str, int]:
    command = [sys.executable, "-m", "vllm_delta_sync.bench.memory_probe", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeltaSyncError(f"measuring the memory of {arguments[0]!r} failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout)
    return found
