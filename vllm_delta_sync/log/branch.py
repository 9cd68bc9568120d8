"""The manifests of a run, fetched by reference and remembered, and the way down from one to those before it.

Does not know where to go or what else leads there: `route` does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_delta_sync.errors import LogError, NotFound, VersionGap
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest, ObjectRef

if TYPE_CHECKING:
    from vllm_delta_sync.log.reader import DeltaLog

KEPT_MANIFESTS = 256
KEPT_LINKS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Link:
    """What of a manifest is kept when the rest of it is forgotten."""

    version: int
    parent: ObjectRef | None
    state_root: str
    bytes: int


class Branch:
    """What was seen of a run's versions. Not for use from several threads at once."""

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()  # by SHA-256
        self._links: OrderedDict[str, _Link] = OrderedDict()  # by SHA-256
        self._sizes: OrderedDict[int, int] = OrderedDict()  # version → bytes of its delta, as far as seen

    def manifest(self, ref: ObjectRef) -> Manifest:
        """The manifest of a reference, from memory if it was fetched lately. Raises as `DeltaLog.manifest` does."""
        if (known := self._manifests.get(ref.sha256)) is not None:
            self._manifests.move_to_end(ref.sha256)
            return known
        manifest = self._log.manifest(ref)
        self._manifests[ref.sha256] = manifest
        if len(self._manifests) > KEPT_MANIFESTS:
            self._manifests.popitem(last=False)
        self._keep(ref, manifest)
        return manifest

    def state_root(self, ref: ObjectRef) -> str | None:
        """The state root of a version; None where its manifest was not seen, and nothing is fetched for this."""
        known = self._links.get(ref.sha256)
        return None if known is None else known.state_root

    def size(self, version: int) -> int | None:
        """Bytes of a version's delta, if it was seen."""
        return self._sizes.get(version)

    def typical_size(self, pointer: LatestPointer) -> int:
        """A guess at the bytes of a delta that was not seen yet: as many as the tip's, or as the last that was.

        Raises VersionGap when LATEST contradicts the manifest it names.
        """
        try:
            self._link(pointer.manifest)
        except (LogError, NotFound):  # what cannot be read may not be needed: there is a pin, or another way
            return next(reversed(self._sizes.values()), 0)
        return self._at(pointer.manifest, pointer.version).bytes

    def below(self, at: int, ref: ObjectRef, version: int) -> ObjectRef:
        """What leads to a version at or before `at`, whose manifest `ref` leads to.

        Raises VersionGap when a parent is missing or is not the version before, and what reading manifests raises.
        """
        link = self._at(ref, at)
        while at > version:
            if link.parent is None:
                raise VersionGap(f"{self._log.store.uri}/{ref.key}: version {at} has no parent")
            at, ref = at - 1, link.parent
            link = self._at(ref, at)
        return ref

    def _at(self, ref: ObjectRef, version: int) -> _Link:
        link = self._link(ref)
        if link.version != version:
            raise VersionGap(
                f"{self._log.store.uri}/{ref.key}: version {link.version} where {version} must be; versions must be "
                "contiguous, and LATEST must name the version of its manifest"
            )
        return link

    def _link(self, ref: ObjectRef) -> _Link:
        return self._links.get(ref.sha256) or self._keep(ref, self.manifest(ref))

    def _keep(self, ref: ObjectRef, manifest: Manifest) -> _Link:
        link = _Link(manifest.version, manifest.parent, manifest.state_root, manifest.totals.bytes)
        self._links[ref.sha256] = link
        self._sizes[manifest.version] = link.bytes
        for kept in (self._links, self._sizes):
            if len(kept) > KEPT_LINKS:
                kept.popitem(last=False)
        return link
