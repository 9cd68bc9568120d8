"""Compares what LATEST says with what is served: is there a way to go, which steps are on it, what is odd.

Pure: no I/O, no state. Does not look for the way: `log.route` does.
"""

from __future__ import annotations

from vllm_delta_sync.errors import VersionGap
from vllm_delta_sync.serving.messages import Place
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer


def oddity(old: LatestPointer | None, new: LatestPointer, place: Place | None) -> str | None:
    """What about the new LATEST of the same run no writer that keeps the protocol would write; None when all is well.

    Args:
        old: what LATEST said before, if anything was heard of this run.
        place: the version of this run that is served.
    """
    seen = max(old.version if old else 0, place.version if place else 0)
    still = f"still serving version {place.version}" if place else "nothing of this run is served yet"
    if new.version < seen:
        return f"LATEST went back from version {seen} to {new.version}, which only a pin may ask for; {still}"
    if place is not None and new.version == place.version and new.manifest.sha256 != place.ref.sha256:
        return (
            f"version {new.version} of LATEST is {new.manifest.sha256[:12]}…, version {place.version} that is served "
            f"is {place.ref.sha256[:12]}…: the log was forked; {still}"
        )
    return None


def leads_on(pointer: LatestPointer, place: Place | None) -> bool:
    """Whether a step is to be taken: towards the goal, backwards only under a pin."""
    if place is None or pointer.pin is not None:
        return place is None or place.version != pointer.pin
    return place.version < pointer.version


def check_step(hop: Hop, pointer: LatestPointer, place: Place | None) -> None:
    """Raise VersionGap unless the step begins at what is served and goes where the server may be seen to go."""
    if hop.source is not None and (place is None or hop.source != place.version):
        held = "no version" if place is None else f"version {place.version}"
        raise VersionGap(f"the {hop.kind} from version {hop.source} to {hop.to} was planned, but {held} is served")
    if place is not None and hop.to < place.version and pointer.pin is None:
        raise VersionGap(
            f"the way from version {place.version} to {pointer.version} goes back to version {hop.to}, which only a "
            "pin may ask for"
        )


def require_follows(hop: Hop, place: Place | None) -> None:
    """Raise VersionGap unless the step begins at what is held; an anchor begins anywhere."""
    if hop.kind == "anchor":
        return
    held = "weights of no version" if place is None else f"version {place.version} ({place.ref.sha256[:12]}…)"
    if place is None or hop.source != place.version:
        raise VersionGap(f"the {hop.kind} to version {hop.to} begins at version {hop.source}; held are {held}")
    if hop.parent is not None and hop.parent.sha256 != place.ref.sha256:
        raise VersionGap(
            f"version {hop.to} does not follow what is served: its parent is {hop.parent.sha256[:12]}…, held is {held}"
        )
    if hop.before is not None and hop.before != place.root:
        raise VersionGap(
            f"the fold from version {hop.source} to {hop.to} begins at state root {hop.before[:12]}…, that of {held} "
            f"is {place.root[:12]}…"
        )
