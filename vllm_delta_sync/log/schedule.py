"""Which folds to write when, when a full checkpoint is due, and which folds a catalog keeps: all pure.

Does not read, compose or write anything: `folding` and `anchoring` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log.retention import leading_to
from vllm_delta_sync.wire.canonical_json import MAX_BYTES
from vllm_delta_sync.wire.catalog import MAX_ENTRIES, Anchor, Catalog, Fold

NEAR = 256  # versions behind the tip within which every fold is kept
_ROOM = MAX_BYTES * 7 // 8  # of a catalog; the rest is for what others add


@dataclass(frozen=True, slots=True)
class FoldSchedule:
    """Long folds that overlap, a short one behind each, and folds end to end.

    At every version divisible by `stride` a fold of `reach` − `stride` + 1 versions begins. Whoever is `reach` versions
    behind finds one of them on its way, wherever it is, and has `stride` − 1 versions left, before and behind it. Where
    a long fold ends, a short one begins, which is on that way as well. In a young run the long ones begin at the base,
    as most followers do.

    And a version divisible by baseᵏ, k = 1 … levels, ends a fold of baseᵏ versions. Of these alone a follower far
    behind takes many and pays more than twice what one fold of its whole way would cost, as what changed twice counts
    twice. Where `stride` is a multiple of `base` they lead to where the long ones begin, so that the catalog names the
    manifests there, and who did not see the deltas still composes long folds. docs/performance.md says what each costs.

    Raises ConfigError when a number is out of range.
    """

    base: int = 7  # at least 2
    levels: int = 1  # at least 0
    reach: int = 100  # versions; 0: no long folds
    stride: int = 7  # versions; at least 1 and less than `reach`

    def __post_init__(self) -> None:
        if self.base < 2 or self.levels < 0 or self.base**self.levels > 1 << 20:
            raise ConfigError(
                f"folds of base {self.base} at {self.levels} levels: the base must be at least 2, the levels at least "
                "0, and the longest fold at most 2**20 versions"
            )
        if self.reach and not 1 <= self.stride < self.reach <= 1 << 20:
            raise ConfigError(
                f"a reach of {self.reach} versions at a stride of {self.stride}: the stride must be at least 1 and "
                "less than the reach, which is 0 or at most 2**20"
            )

    @property
    def longest(self) -> int:
        """Versions that the longest fold spans; 1 without folds."""
        end_to_end: int = self.base**self.levels
        return max(end_to_end, self._long)

    @property
    def _long(self) -> int:
        return self.reach - self.stride + 1 if self.reach else 1

    @property
    def _short(self) -> int:
        """Versions of a short fold; none is written where that is less than two.

        Long ones begin at versions ≡ 0 and end at ≡ e (mod `stride`). Of a + b = stride − 1 versions before and behind
        its long fold, whoever is `reach` behind finds the short one, [e, e + short], behind it if b ≥ short; else
        a ≥ stride − short, and it is before it if short ≤ e and e + short ≤ stride. So these are the bounds.
        """
        ends = self._long % self.stride
        return min(ends, self.stride - ends)

    def lengths(self, version: int, waiting: Iterable[int] = ()) -> tuple[int, ...]:
        """The lengths in versions of the folds that end at `version`, ascending, none before version 0.

        Args:
            waiting: later versions whose folds are due as well. The long fold, by far the dearest, is left to them
                where they have one, so that who folds more slowly than others publish keeps near the tip.
        """
        found = {self.base**level for level in range(1, self.levels + 1) if version % self.base**level == 0}
        if self._ends_long(version) and not any(map(self._ends_long, waiting)):
            found.add(min(self._long, version))
        if self.reach and (version - self._long - self._short) % self.stride == 0:
            found.add(self._short)
        return tuple(sorted(length for length in found if 1 < length <= version))

    def _ends_long(self, version: int) -> bool:
        return self.reach > 0 and (version - self._long) % self.stride == 0

    def missing(self, catalog: Catalog, first: int, last: int, waiting: Iterable[int] = ()) -> list[tuple[int, int]]:
        """(source, to) of the folds that end at versions `first` … `last` and that the catalog lacks, ascending by to.

        Args:
            waiting: later versions, as for `lengths`.
        """
        have, later = {_ends(fold) for fold in catalog.folds}, tuple(waiting)
        wanted = ((to - length, to) for to in range(first, last + 1) for length in self.lengths(to, later))
        return [ends for ends in wanted if ends not in have]


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """A full checkpoint is written when getting there from the last one (or the base) has become dear.

    Raises ConfigError when a number is out of range.
    """

    share: float = 0.5  # of a full copy's bytes, that the fold from the last anchor may cost
    every: int = 96  # versions between two looks; each look writes that fold, unless it writes an anchor

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.every < 1:
            raise ConfigError(
                f"anchors at a share of {self.share}, looked at every {self.every} versions: the share must be above 0 "
                "and at most 1, the interval at least 1"
            )

    def due(self, folded: int | None, full: int) -> bool:
        """Whether to write an anchor.

        Args:
            folded: bytes of the fold since the last anchor; None when there can be none, as it would exceed a copy.
            full: bytes of a full copy.
        """
        return folded is None or folded > self.share * full


FOLDS = FoldSchedule()  # what a publisher does unless it is told otherwise
ANCHORS = AnchorPolicy()


def with_folds(catalog: Catalog, made: Iterable[Fold]) -> Catalog:
    """The catalog with these folds in it, each in the place of any between the same versions."""
    found = {_ends(fold): fold for fold in (*catalog.folds, *made)}
    return catalog.model_copy(update={"folds": tuple(found[ends] for ends in sorted(found))})


def prune(catalog: Catalog, tip: int, pin: int | None = None, room: int = _ROOM) -> Catalog:
    """The catalog without the folds that no reader needs, and within `room` bytes.

    A reader holds the base, an anchor, or any version whose delta is there. So there stay:
    - from the base and from each anchor, the fold that goes furthest, which is the way of whoever starts there,
    - the ways from there to where the deltas that are left begin,
    - all folds that end at most NEAR versions before the tip,
    - of older ones, a chain of the longest, end to end as far as they meet,
    - while a version is pinned, all: any may be part of the way to it, or back from it.
    If that is too much, the ones that end first go, those of the first two kinds last. Before that, old anchors go that
    leave less than half of the room for folds: every version before the newest anchor still goes on from that.
    """
    if pin is None:
        catalog = catalog.model_copy(update={"anchors": tuple(_newest(catalog.anchors, room // 2))})
    starts = {0, *(anchor.version for anchor in catalog.anchors)}
    forward = [fold for fold in catalog.folds if fold.source < fold.to]
    far: dict[int, Fold] = {}
    for fold in forward:
        if fold.source in starts and (fold.source not in far or fold.to > far[fold.source].to):
            far[fold.source] = fold
    vital = {_ends(fold) for fold in (*far.values(), *leading_to(catalog.oldest, starts, forward))}
    older = [fold for fold in forward if fold.to < tip - NEAR and fold.source not in starts]
    kept = vital | {_ends(fold) for fold in _chain(older)}
    staying = [
        fold
        for fold in catalog.folds
        if pin is not None or _ends(fold) in kept or max(fold.source, fold.to) >= tip - NEAR
    ]
    staying.sort(key=lambda fold: (_ends(fold) in vital, max(fold.source, fold.to)))
    return _fitting(catalog, staying, room)


def _newest(anchors: Sequence[Anchor], room: int) -> list[Anchor]:
    """As many of the newest anchors as fit, and the newest one in any case."""
    fitting: list[Anchor] = []
    for anchor in reversed(anchors):
        room -= len(anchor.to_bytes()) + 1
        if room < 0 and fitting:
            break
        fitting.insert(0, anchor)
    return fitting


def _ends(fold: Fold) -> tuple[int, int]:
    return fold.source, fold.to


def _chain(folds: list[Fold]) -> list[Fold]:
    found: list[Fold] = []
    for fold in sorted(folds, key=lambda fold: (fold.source, -fold.to)):
        if not found or fold.source >= found[-1].to:
            found.append(fold)
    return found


def _fitting(catalog: Catalog, order: list[Fold], room: int) -> Catalog:
    """The catalog with as many of the last of `order` as fit."""
    taken = len(catalog.model_copy(update={"folds": ()}).to_bytes())
    fitting: list[Fold] = []
    for fold in reversed(order[-MAX_ENTRIES:]):
        taken += len(fold.to_bytes()) + 1
        if taken > room:
            break
        fitting.append(fold)
    return catalog.model_copy(update={"folds": tuple(sorted(fitting, key=_ends))})
