"""Finding the newest version that can be trusted from the objects alone, and letting LATEST name it.

Does not delete or mend any object, and does not choose between two branches by itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import LogError, MalformedObject, NotFound, Unavailable, VersionGap
from vllm_delta_sync.log import fetch, names
from vllm_delta_sync.log import pointer as latest
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.checking import Checked, State, check_anchor, check_payload
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire import canonical_json, state_hash
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest, ObjectRef

_MANIFEST = re.compile(r"versions/\d{20}/[0-9a-f]{32}\.manifest\.json")
_CATALOG = re.compile(r"catalogs/(\d{20})-[0-9a-f]{32}\.json")


@dataclass(frozen=True, slots=True)
class Node:
    """A manifest that was found: what leads to it, its version and its parent's SHA-256."""

    ref: ObjectRef
    version: int
    parent: str | None


@dataclass(frozen=True, slots=True)
class Repaired:
    """What LATEST says now, whether that is new, and how many versions were found and how many of them verify."""

    pointer: LatestPointer
    changed: bool
    found: int
    sound: int


def repair_latest(log: DeltaLog, *, to: str | None = None, progress: Progress = silent) -> Repaired:
    """Let LATEST name the newest version whose whole chain verifies from version 0 or an anchor.

    A pin and the catalog are kept as far as they still hold. Nobody may publish meanwhile.

    Args:
        to: the key of the manifest to end at, where several branches compete and LATEST names none of them.

    Raises VersionGap when nothing verifies, when branches compete and neither tells, Unavailable when LATEST
    is written meanwhile, and what the store raises.
    """
    found = _manifests(log)
    catalog, sequence, pointer = _catalog(log)
    digests = _sound(log, found, catalog, progress)
    sound = [node for node in found if node.ref.sha256 in digests]
    chosen = _choose(log, contenders(found, digests, catalog.oldest), to, pointer)
    branch = _branch(found, chosen)
    base = _base(log, branch, sound, pointer)
    kept = trimmed(catalog, {node.version: node.ref.sha256 for node in branch}, chosen.version)
    if pointer is not None and kept == catalog and _names(pointer, chosen.ref, base):
        return Repaired(pointer, False, len(found), len(sound))
    tip, base = _found_by_content(log, chosen.ref), _found_by_content(log, base)

    def named(current: LatestPointer | None) -> LatestPointer:
        if current is not None and (pointer is None or current.manifest != pointer.manifest):
            raise Unavailable(f"{log.store.uri}: LATEST was written meanwhile; stop whoever publishes and try again")
        at = sequence if current is None else current.sequence
        pin = current.pin if current is not None and current.pin is not None and current.pin <= chosen.version else None
        return LatestPointer(
            run=log.run,
            sequence=at,
            version=chosen.version,
            manifest=tip,
            base=base,
            catalog=put_catalog(log.store, kept, at + 1) if kept != Catalog(run=log.run) else None,
            pin=pin,
        )

    return Repaired(_write(log, named), True, len(found), len(sound))


def contenders(found: Sequence[Node], sound: Collection[str], oldest: int) -> list[Node]:
    """The tips of branches that may be what was published last, the newest first; one where nothing competes.

    A manifest that others were published on was once named by LATEST: a writer goes on from nothing else. One beside
    it, which none was published on, is what an attempt left that never came so far, and no contender.

    Args:
        found: every manifest there is.
        sound: SHA-256 of those to which something leads that verifies.
        oldest: where the deltas begin, by the catalog.
    """
    by_digest = {node.ref.sha256: node for node in found}
    grown = {node.parent for node in found}
    beside = {node.parent for node in found if node.ref.sha256 in grown}  # parents of what was published on
    possible = {digest for digest in sound if digest in grown or by_digest[digest].parent not in beside}
    behind: set[str] = set()  # what a possible one was published on, at whatever distance
    for node in sorted(found, key=lambda node: node.version, reverse=True):
        if node.parent is not None and (node.ref.sha256 in possible or node.ref.sha256 in behind):
            behind.add(node.parent)
    tips = [by_digest[digest] for digest in possible - behind]
    # What led on from a manifest that is kept for a fold's sake may be gone, on purpose.
    tips = [node for node in tips if node.version > oldest] or tips
    return sorted(tips, key=lambda node: (-node.version, node.ref.key))


def trimmed(catalog: Catalog, branch: Mapping[int, str], tip: int) -> Catalog:
    """The catalog without the folds and anchors that end beyond the tip or off the branch (version → SHA-256)."""

    def holds(version: int, ref: ObjectRef) -> bool:
        return version <= tip and branch.get(version, ref.sha256) == ref.sha256

    return catalog.model_copy(
        update={
            "oldest": min(catalog.oldest, tip),
            "folds": tuple(fold for fold in catalog.folds if holds(fold.to, fold.manifest) and fold.source <= tip),
            "anchors": tuple(anchor for anchor in catalog.anchors if holds(anchor.version, anchor.manifest)),
        }
    )


def _manifests(log: DeltaLog) -> list[Node]:
    found = []
    for key in log.store.list("versions/"):
        if _MANIFEST.fullmatch(key) is None:
            continue
        try:
            data = fetch.bounded(log.store, key, canonical_json.MAX_BYTES)
            manifest = Manifest.from_bytes(data, f"{log.store.uri}/{key}")
        except (LogError, NotFound):
            continue  # a manifest that cannot be read is none of a chain that verifies
        if manifest.run == log.run:
            parent = None if manifest.parent is None else manifest.parent.sha256
            ref = ObjectRef(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            found.append(Node(ref, manifest.version, parent))
    return found


def _catalog(log: DeltaLog) -> tuple[Catalog, int, LatestPointer | None]:
    """The catalog that LATEST names, else the newest that can be read; the last sequence; LATEST if it can be read."""
    keys = {key: int(match[1]) for key in log.store.list("catalogs/") if (match := _CATALOG.fullmatch(key))}
    sequence = max(keys.values(), default=0)
    pointer = None
    try:
        pointer = log.latest()
        return log.catalog(pointer), max(sequence, pointer.sequence), pointer
    except (LogError, NotFound):
        pass
    for key in sorted(keys, key=lambda key: keys[key], reverse=True):
        try:
            data = fetch.bounded(log.store, key, canonical_json.MAX_BYTES)
            catalog = Catalog.from_bytes(data, f"{log.store.uri}/{key}")
        except (LogError, NotFound):
            continue
        if catalog.run == log.run:
            return catalog, sequence, pointer
    return Catalog(run=log.run), sequence, pointer


def _sound(log: DeltaLog, found: Sequence[Node], catalog: Catalog, progress: Progress) -> set[str]:
    """The SHA-256 of every manifest that version 0 or an anchor leads to with nothing wrong on the way."""
    children: dict[str | None, list[Node]] = {}
    for node in found:
        children.setdefault(node.parent, []).append(node)
    by_digest = {node.ref.sha256: node for node in found}
    reached: dict[str, State] = {}
    open_nodes: list[Node] = []

    def reach(node: Node | None, checked: Checked) -> None:
        if node is not None and checked.state is not None and not checked.faults and node.ref.sha256 not in reached:
            reached[node.ref.sha256] = checked.state
            open_nodes.append(node)

    for node in found:
        if node.version == 0:
            reach(node, check_payload(log, log.manifest(node.ref), None))
    for anchor in catalog.anchors:
        reach(by_digest.get(anchor.manifest.sha256), check_anchor(log, anchor))
    while open_nodes:
        node = open_nodes.pop()
        progress("verifying", len(reached), len(found))
        state, root = reached[node.ref.sha256], state_hash.state_root(reached[node.ref.sha256])
        reached[node.ref.sha256] = {}  # its state is not needed any more once it was handed on
        for child in children.get(node.ref.sha256, []):
            if child.ref.sha256 not in reached:
                reach(child, check_payload(log, log.manifest(child.ref), state))
        for fold in catalog.folds:
            target = by_digest.get(fold.manifest.sha256)
            leads_on = fold.source == node.version < fold.to and fold.before == root
            if leads_on and target is not None and target.ref.sha256 not in reached:
                reach(target, check_payload(log, fold, state))
    progress("verifying", len(found), len(found))
    return set(reached)


def _choose(log: DeltaLog, tips: Sequence[Node], to: str | None, pointer: LatestPointer | None) -> Node:
    if not tips:
        raise VersionGap(f"{log.store.uri}: no version verifies from version 0 or an anchor; there is nothing to go to")
    if to is None and len(tips) == 1:
        return tips[0]
    if to is None and pointer is not None:
        to = next((node.ref.key for node in tips if node.ref.sha256 == pointer.manifest.sha256), None)
    named = next((node for node in tips if node.ref.key == to), None)
    if named is not None:
        return named
    listed = ", ".join(f"version {node.version} ({node.ref.key})" for node in tips)
    problem = f"{len(tips)} branches compete" if to is None else f"{to} is not the tip of a branch that verifies"
    raise VersionGap(f"{log.store.uri}: {problem}; name one of {listed}")


def _names(pointer: LatestPointer, tip: ObjectRef, base: ObjectRef) -> bool:
    return (pointer.manifest.sha256, pointer.base.sha256) == (tip.sha256, base.sha256)


def _branch(found: Iterable[Node], tip: Node) -> list[Node]:
    by_digest = {node.ref.sha256: node for node in found}
    branch = [tip]
    while (parent := branch[-1].parent) is not None and parent in by_digest:
        branch.append(by_digest[parent])
    return branch


def _base(log: DeltaLog, branch: Sequence[Node], sound: Sequence[Node], pointer: LatestPointer | None) -> ObjectRef:
    """Version 0 of a branch: where it ends, or the one there is when the deltas after it are gone."""
    bases = [node.ref for node in sound if node.version == 0]
    if branch[-1].version == 0:
        return branch[-1].ref
    named = [ref for ref in bases if pointer is not None and ref.sha256 == pointer.base.sha256]
    if len(named or bases) != 1:
        raise VersionGap(
            f"{log.store.uri}: {len(bases)} manifests of version 0 verify; which one the run began with is lost"
        )
    return (named or bases)[0]


def _found_by_content(log: DeltaLog, ref: ObjectRef) -> ObjectRef:
    return ref.model_copy(update={"content": log.store.head(ref.key).content})


def _write(log: DeltaLog, named: Callable[[LatestPointer | None], LatestPointer]) -> LatestPointer:
    try:
        return latest.update(log, named).pointer
    except (MalformedObject, VersionGap, NotFound):  # there is nothing to go on from
        made = named(None)
        pointer = made.model_copy(update={"sequence": made.sequence + 1})
        log.store.put(names.LATEST, pointer.to_bytes())
        return pointer
