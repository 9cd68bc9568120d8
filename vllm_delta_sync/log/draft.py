"""A catalog that is in the store and that nothing names yet, so that the next version's write of LATEST can.

Does not write anything, or decide when it is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef

Change: TypeAlias = Callable[[Catalog], Catalog]
Place: TypeAlias = tuple[str | None, int | None]


@dataclass(frozen=True, slots=True)
class Draft:
    """A catalog, what leads to it, and what made it.

    Each of `changes` is in it; it may be named where LATEST has one of `fits`, and is made anew elsewhere.
    """

    catalog: Catalog
    ref: ObjectRef
    changes: tuple[Change, ...]
    fits: frozenset[Place]

    def may_follow(self, found: LatestPointer) -> bool:
        """Whether it holds all that the catalog of `found` does, and was made under the same pin."""
        return place(found) in self.fits

    def then(self, catalog: Catalog, ref: ObjectRef, change: Change, pin: int | None) -> Draft:
        """The draft that was made of this one, which may be named meanwhile or not."""
        return Draft(catalog, ref, (*self.changes, change), self.fits | {(ref.sha256, pin)})


def place(found: LatestPointer) -> Place:
    """What a draft is made for: the catalog in LATEST, by its SHA-256, and the pin."""
    return None if found.catalog is None else found.catalog.sha256, found.pin


def drafted(catalog: Catalog, ref: ObjectRef, changes: tuple[Change, ...], at: LatestPointer) -> Draft:
    """The draft that was made of the catalog of `at`; itself it fits, too, where a write of it arrived unnoticed."""
    return Draft(catalog, ref, changes, frozenset({place(at), (ref.sha256, at.pin)}))
