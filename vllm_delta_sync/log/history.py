"""What was published when: the versions of a run from the newest on, and the runs of a bucket.

Does not read blocks, and does not check more than the digests on the way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_delta_sync.errors import LogError, MalformedObject, NotFound
from vllm_delta_sync.log import fetch, names
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.store import Store, child
from vllm_delta_sync.wire import codec_rules
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest

_LATEST = re.compile(rf"([0-9a-f]{{32}})/{names.LATEST}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A version as it was published, and what the catalog has at it.

    `codecs` gives the share of the stored bytes of its blocks, 0 … 1, by codec, the largest first.
    """

    manifest: Manifest
    codecs: tuple[tuple[str, float], ...]
    anchor: bool
    folds_from: tuple[int, ...]  # the sources of folds that end here

    @property
    def changed_percent(self) -> float:
        """Of the model's elements, 0 … 100."""
        totals = self.manifest.totals
        return 100 * totals.changed / totals.elements if totals.elements else 0.0


def entries(log: DeltaLog, pointer: LatestPointer, limit: int | None = None) -> Iterator[Entry]:
    """The versions whose deltas are left, from the tip down, and version 0 last; `limit` of them at most.

    Raises what reading the catalog, manifests and tables raises.
    """
    catalog = log.catalog(pointer)
    anchors = {anchor.version for anchor in catalog.anchors}
    ends: dict[int, list[int]] = {}
    for fold in catalog.folds:
        ends.setdefault(fold.to, []).append(fold.source)

    def entry(manifest: Manifest) -> Entry:
        version = manifest.version
        return Entry(
            manifest,
            _codecs(log, manifest),
            version in anchors or manifest.anchor is not None,
            tuple(sorted(ends.get(version, []))),
        )

    left = float("inf") if limit is None else limit
    manifest = log.tip(pointer)
    while manifest.version > catalog.oldest and left > 0:
        yield entry(manifest)
        left -= 1
        if manifest.version == catalog.oldest + 1 or left == 0:
            break
        manifest = log.parent(manifest)
    if left > 0:
        yield entry(log.base(pointer))


def _codecs(log: DeltaLog, manifest: Manifest) -> tuple[tuple[str, float], ...]:
    stored: Counter[str] = Counter()
    for block in log.table(manifest).blocks:
        stored[codec_rules.NAMES[block.codec]] += block.stored
    return tuple((name, count / stored.total()) for name, count in stored.most_common())


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a bucket: its tip, or why that cannot be read."""

    run: str
    current: bool
    pointer: LatestPointer | None
    tip: Manifest | None
    base: Manifest | None
    fault: str | None


def runs(root: Store) -> list[Run]:
    """The runs of a bucket, the newest first by their writers' clocks. Raises what listing raises."""
    try:
        current = fetch.bounded(root, names.RUN, 64).decode("ascii", "replace")
    except (NotFound, MalformedObject):
        current = ""
    ids = [match[1] for key in root.list() if (match := _LATEST.fullmatch(key))]
    found = [_run(root, run, run == current) for run in ids]
    return sorted(found, key=lambda run: (-(run.base.created if run.base else 0.0), run.run))


def _run(root: Store, run: str, current: bool) -> Run:
    log = DeltaLog(child(root, run), run)
    try:
        pointer = log.latest()
        return Run(run, current, pointer, log.tip(pointer), log.base(pointer), None)
    except (LogError, NotFound) as error:
        return Run(run, current, None, None, None, f"{error.cause}: {error}")
