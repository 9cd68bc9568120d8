"""The demo's server that follows a bucket: its settings, its status, and looks into its live memory.

Does not train, publish or judge.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_delta_sync.demo.server import VllmServer

POLL_INTERVAL_S = 0.5
_ANSWER_TIMEOUT_S = 180.0


class NotFollowing(RuntimeError):
    """The server did not get where it should in time; the message carries its last error."""


@dataclass(frozen=True)
class Commit:
    """One version as the server tells it."""

    version: int
    changed: int  # elements
    stage_s: float
    commit_s: float  # the engine's pause
    at: float  # Unix seconds


class Session:
    """One `vllm serve` with the worker extension, following a bucket in the working directory.

    Args:
        work: directory for its log, its settings and its status.
        model: checkpoint directory that it starts on.
        bucket: URI of the store.
        tensor_parallel: ranks.
    """

    def __init__(self, work: Path, model: Path, bucket: str, tensor_parallel: int) -> None:
        self._ranks = tensor_parallel
        self._runtime = work / "runtime"  # of its own, so that the only status in it is this server's
        self._runtime.mkdir(parents=True, exist_ok=True)
        settings = {"store": bucket, "poll_interval_s": POLL_INTERVAL_S}
        self.server = VllmServer(
            model,
            work / "server.log",
            tensor_parallel=tensor_parallel,
            options={
                "worker-extension-cls": "vllm_delta_sync.WorkerExtension",
                "additional-config": {"delta_sync": settings},
            },
            environment={
                "XDG_RUNTIME_DIR": str(self._runtime),
                # Without a need for the Hub, vLLM is kept from asking it; whoever follows a bucket there has to.
                "HF_HUB_OFFLINE": "0" if bucket.startswith("hf://") else "1",
            },
        )

    def status(self) -> dict[str, Any]:
        """The engine's own status; empty before it has written one."""
        for file in self._runtime.glob("vllm-delta-sync-*/*.json"):
            body: dict[str, Any] = json.loads(file.read_text())
            return body
        return {}

    def commits(self) -> list[Commit]:
        """The versions committed so far, oldest first."""
        return [
            Commit(
                version=record["version"],
                changed=record["changed"],
                stage_s=record["stage_seconds"],
                commit_s=record["commit_seconds"],
                at=record["at"],
            )
            for record in self.status().get("commits", ())
        ]

    def wait_until_served(self, version: int) -> None:
        """Block until the server serves this version."""
        self._wait(lambda status: status.get("served") == version, f"serve version {version}")

    def audit(self) -> dict[str, Any]:
        """A full pass over the live weights of all ranks: {version, wrong, tensor_hashes}."""
        before = (self.status().get("audit") or {}).get("number", 0)
        self.server.ask_ranks("delta_sync_audit")
        self._wait(lambda status: (status.get("audit") or {}).get("number", 0) > before, "finish an audit")
        found: dict[str, Any] = self.status()["audit"]
        return found

    def dump(self, directory: Path) -> None:
        """Have every rank write its live weights into `directory`."""
        for answer in self.server.ask_ranks("delta_sync_dump", str(directory)):
            if not answer["ok"]:
                raise NotFollowing(f"a rank could not write out its weights: {answer['text']}")

    def _wait(self, reached: Any, what: str) -> None:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while not reached(self.status()):
            if time.monotonic() > deadline:
                last = self.status().get("last_error") or "it reports no error"
                raise NotFollowing(f"the server did not {what} within {_ANSWER_TIMEOUT_S:.0f} s: {last}")
            time.sleep(0.1)
