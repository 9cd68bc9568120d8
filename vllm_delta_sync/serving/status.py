"""The status file: how one engine stands, as JSON, for the metrics in the API process, for tools and for people.

Does not talk to the engine. The file is replaced atomically, so a reader sees a whole status or the one before; it is
found by the engine's instance id, which every process of one server knows.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.serving.state import Status

logger = logging.getLogger("vllm.delta_sync")


def status_path(instance_id: str, engine_index: int) -> Path:
    """Where the status of that engine lies; the folder is the user's own (mode 0700)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    server = instance_id.partition("_dp")[0]  # vLLM appends the data-parallel rank inside such an engine
    return Path(runtime) / f"vllm-delta-sync-{os.getuid()}" / f"{server}-{engine_index}.json"


def _own_folder(path: Path) -> None:
    """Make the folder, or refuse one that somebody else could write into (it may lie in a shared /tmp)."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"the folder of the status file cannot be made: {error}; set XDG_RUNTIME_DIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a directory of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR")


class StatusFile:
    """Writes one engine's status.

    Args:
        path: see `status_path`.
        extra: gives what the controller does not know (the kernel backend), shown beside the status.
    """

    def __init__(self, path: Path, extra: Callable[[], dict[str, Any]]) -> None:
        self._path = path
        self._extra = extra
        self._sequence = 0
        _own_folder(path.parent)

    def write(self, status: Status) -> None:
        self._sequence += 1
        body = {
            **self._extra(),
            "sequence": self._sequence,
            "phase": status.phase.value,
            "run": status.run,
            "served_run": status.served_run,
            "served": status.served,
            "latest": status.latest,
            "pin": status.pin,
            "goal": status.goal,
            "lag": status.lag,
            "run_changes": status.run_changes,
            "failures": status.failures,
            "last_error": status.last_error,
            "unmapped": list(status.unmapped),
            "committed": status.committed,
            "commits": [dataclasses.asdict(record) for record in status.commits],
            "audits": status.audits,
            "audit": _audit(status),
        }
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(body))
            os.replace(temporary, self._path)
        except OSError as error:  # a full disk costs the metrics, not the server
            logger.error("delta-sync: cannot write the status file %s: %s", self._path, error)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _audit(status: Status) -> dict[str, Any] | None:
    audit = status.audit
    if audit is None:
        return None
    lanes = None if audit.lanes is None else [row.astype(">u4").tobytes().hex() for row in np.atleast_2d(audit.lanes)]
    return {
        "number": audit.number,
        "version": audit.version,
        "wrong": list(audit.wrong),
        "seconds": audit.seconds,
        "tensor_hashes": lanes,
    }
