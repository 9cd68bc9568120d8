"""Noticing another publisher of the same run, where the store has no conditional writes.

Does not lock anything. Each writer puts its manifest before it lists the version's manifests, and lists them before it
writes LATEST: of two that write the same version at the same time, at least one sees the other's.
"""

from __future__ import annotations

from datetime import UTC, datetime

from vllm_delta_sync.errors import DeltaSyncError, RivalWriter
from vllm_delta_sync.log import names
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire.manifest import Manifest, ObjectRef

_MANIFEST = ".manifest.json"


class Lookout:
    """Looks for manifests of others among those of the version that is being written."""

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._version = -1
        self._own: set[str] = set()  # keys of this writer's own manifests of that version
        self._known: set[str] = set()  # keys of others' that say nothing about a rival

    def arrive(self, version: int) -> None:
        """A writer has attached, and will begin with `version`: what is there already was left by one before it.

        If that one lives after all, its version is in LATEST long before the new writer's first.
        """
        if not self._log.store.conditional:
            self._version, self._known = version, self._listed(version)

    def begin(self, version: int, attempt: str) -> None:
        """A writer is about to put the manifest of `version`."""
        if version != self._version:
            self._version, self._own, self._known = version, set(), set()
        self._own.add(names.manifest(version, attempt))

    def require_alone(self, parent: ObjectRef) -> None:
        """Raise RivalWriter when somebody else has put a manifest of the version, on the same parent, since `begin`."""
        if self._log.store.conditional:
            return
        for key in sorted(self._listed(self._version) - self._own - self._known):
            other = _read(self._log, key)
            if other is not None and other.parent is not None and other.parent.sha256 == parent.sha256:
                raise RivalWriter(
                    f"{self._log.store.uri}: another publisher wrote {_told(other, key)} at the same time as this one "
                    f"wrote {', '.join(sorted(self._own))}; stop one of the two, and resume from the log"
                )
            self._known.add(key)  # of a branch that was left, or of a writer that has given up

    def _listed(self, version: int) -> set[str]:
        found = self._log.store.list(names.version_prefix(version) + "/")
        return {key for key in found if key.endswith(_MANIFEST)}


def described(log: DeltaLog, ref: ObjectRef, version: int) -> str:
    """A version for messages: its number, manifest, age and step, as far as they can be read."""
    try:
        return _told(log.manifest(ref), ref.key)
    except DeltaSyncError:
        return f"version {version} ({ref.key}, which cannot be read)"


def _told(manifest: Manifest, key: str) -> str:
    try:
        written = datetime.fromtimestamp(manifest.created, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        written = "a time that is none"
    step = "" if manifest.step is None else f", step {manifest.step}"
    return f"version {manifest.version} ({key}, written {written}{step})"


def _read(log: DeltaLog, key: str) -> Manifest | None:
    """A manifest that nothing refers to yet; None when it is gone again or none of this run's."""
    try:
        return log.unreferenced_manifest(key)
    except DeltaSyncError:
        return None
