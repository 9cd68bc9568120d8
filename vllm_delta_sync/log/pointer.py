"""Changing LATEST, the one object of a run that is ever replaced.

Does not decide what it may say: `LogWriter` does for versions, `pinning`, `retention` and `repair` for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from vllm_delta_sync.errors import (
    AlreadyExists,
    NotFound,
    PreconditionFailed,
    RateLimited,
    StoreError,
    Unauthorized,
    Unavailable,
    UnsettledWrite,
)
from vllm_delta_sync.log import names
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.store import ObjectInfo
from vllm_delta_sync.wire.manifest import LatestPointer

_ATTEMPTS = 10  # writes that others came before, in a row
_LATE_S = (1.0, 2.0, 4.0, 8.0)  # between looks for a write whose answer was lost


@dataclass(frozen=True, slots=True)
class Seen:
    """What LATEST says, and its tag from before it was read: whatever came in between, the tag is the older."""

    pointer: LatestPointer
    info: ObjectInfo


def look(log: DeltaLog, known: Seen | None = None) -> Seen:
    """LATEST as it is now; `known` again, without reading it, while its tag is the same.

    Raises NotFound, MalformedObject or VersionGap as `DeltaLog.latest` does.
    """
    info = log.store.head(names.LATEST)
    if known is not None and known.info.tag == info.tag:
        return known
    return Seen(log.latest(info), info)


def update(
    log: DeltaLog,
    change: Callable[[LatestPointer], LatestPointer],
    known: Seen | None = None,
    *,
    sleep: Callable[[float], object] = time.sleep,
) -> Seen:
    """Write what `change` makes of LATEST; returns what was written, with its tag.

    Args:
        known: LATEST as it was seen just now; it is looked at first when left out.

    `change` states everything but the sequence, and is asked again when somebody else wrote meanwhile. Where the store
    has conditional writes, nothing that it did not see is overwritten; elsewhere a write at the same moment is, between
    a last look and the write, and its writer finds out when it looks again.

    Raises UnsettledWrite when a write fails so that what became of it cannot be told, otherwise what the store, reading
    LATEST or `change` raises: it is not written then.
    """
    for _ in range(_ATTEMPTS):
        seen = known or look(log)
        made = change(seen.pointer)
        if not log.store.conditional and (now := look(log, seen)) is not seen:
            known = now  # whatever `change` took its time for: nobody else will refuse to overwrite what came meanwhile
            continue
        numbered = made.model_copy(update={"sequence": max(seen.pointer.sequence, made.sequence) + 1})
        pointer = LatestPointer.from_bytes(numbered.to_bytes(), names.LATEST)  # a copy may have been given any value
        try:
            return Seen(pointer, _write(log, pointer, seen.info.tag))
        except PreconditionFailed:
            # Also what a store says that tried again by itself after it had lost the answer to its first try.
            known = look(log)
            if known.pointer == pointer:
                return known
        except (Unauthorized, RateLimited, NotFound, AlreadyExists):
            raise  # a refusal: nothing was written, and asking what became of it would be refused too
        except StoreError as error:
            if (settled := _settle(log, pointer, error, sleep)) is None:
                raise
            return settled
    raise Unavailable(f"{log.store.uri}/{names.LATEST}: others wrote to it {_ATTEMPTS} times in a row; try again")


def carried(
    own: LatestPointer, found: LatestPointer, manifests: Container[str], catalogs: Container[str]
) -> LatestPointer | None:
    """What the writer of a run goes on from when it finds `found` in LATEST where it left `own`; None for a rival's.

    Its own versions stay, also when LATEST names an older one of them: so it does after a pin that was written over a
    newer LATEST, and after a repair. The pin is always that of `found`. So is the catalog where whoever wrote `found`
    had seen what this writer left, as its sequence tells, and where it is one that this writer never had.

    Args:
        manifests: SHA-256 of the versions that this writer wrote or began at.
        catalogs: SHA-256 of the catalogs that it wrote, took over or began at.
    """
    if found.run != own.run or found.base != own.base or found.manifest.sha256 not in manifests:
        return None
    meant = found.sequence > own.sequence
    foreign = found.catalog is not None and found.catalog.sha256 not in catalogs
    return own.model_copy(
        update={
            "sequence": max(own.sequence, found.sequence),
            "pin": found.pin,
            "catalog": found.catalog if meant or foreign else own.catalog,
        }
    )


def _write(log: DeltaLog, pointer: LatestPointer, tag: str) -> ObjectInfo:
    return log.store.put(names.LATEST, pointer.to_bytes(), over=tag if log.store.conditional else None)


def _settle(
    log: DeltaLog, pointer: LatestPointer, failure: StoreError, sleep: Callable[[float], object]
) -> Seen | None:
    """LATEST if it is `pointer` although its write failed, made durable then; None if it is not.

    A write can arrive although its answer was lost: only what LATEST says now tells. And what a failed sync left can be
    read, from a cache, and still be gone after a crash: only a write that succeeds counts. Where nothing refuses a
    request that arrives late, it is waited for.
    """
    try:
        found = look(log)
        for seconds in () if log.store.conditional else _LATE_S:
            if found.pointer == pointer:
                break
            sleep(seconds)
            found = look(log, found)
        if found.pointer != pointer:
            return None
        return Seen(pointer, _write(log, pointer, found.info.tag))
    except StoreError as error:
        raise UnsettledWrite(
            f"{log.store.uri}/{names.LATEST}: writing version {pointer.version} failed ({failure}), and so did finding "
            f"out what became of it ({error}); open a publisher with resume=True once the store answers again: it goes "
            "on from whichever version is there, and its publish() brings the difference"
        ) from error
