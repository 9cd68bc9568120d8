"""A writer carries catalogs over, puts them, and names one along with a version; none is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_folds
import tiny_log
from hooked_store import HookedStore

from tests.unit.log.writers import idle, with_pin, writer_on
from vllm_delta_sync.errors import NotFound, PublishError, Unavailable
from vllm_delta_sync.log import LogWriter, pointer
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.store import ObjectInfo, together
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import ObjectRef


def test_a_catalog_is_put_and_carried_over(tiny: tiny_log.TinyLog) -> None:
    assert tiny.log.catalog() == Catalog(run=tiny.log.run)
    made = tiny.writer.put_catalog(lambda found: found.model_copy(update={"oldest": 1}))
    assert tiny.log.catalog() == made == Catalog(run=tiny.log.run, oldest=1)
    idle(tiny.writer)
    assert (tiny.log.latest().version, tiny.log.catalog()) == (4, made)


def foreign_catalog(tiny: tiny_log.TinyLog, oldest: int) -> ObjectRef:
    return put_catalog(tiny.log.store, Catalog(run=tiny.log.run, oldest=oldest), 99)


def test_a_catalog_that_somebody_else_put_is_what_the_next_one_is_made_of(tiny: tiny_log.TinyLog) -> None:
    writer, store = writer_on(tiny, conditional=True)
    ref = foreign_catalog(tiny, 2)
    asked: list[int] = []

    def change(found: Catalog) -> Catalog:
        asked.append(found.oldest)
        return found.model_copy(update={"oldest": found.oldest + 1})

    store.before["LATEST"] = lambda: pointer.update(tiny.log, lambda at: at.model_copy(update={"catalog": ref}))
    assert writer.put_catalog(change).oldest == 3
    assert asked == [0, 2]
    assert tiny.log.catalog().oldest == 3


def test_a_catalog_that_was_taken_over_before_does_not_come_back(tiny: tiny_log.TinyLog) -> None:
    ref = foreign_catalog(tiny, 2)
    stale = pointer.update(tiny.log, lambda at: at.model_copy(update={"catalog": ref})).pointer
    idle(tiny.writer)
    tiny.writer.put_catalog(lambda found: found.model_copy(update={"oldest": found.oldest + 1}))
    tiny.say(stale)
    idle(tiny.writer)
    assert tiny.log.catalog().oldest == 3


def test_a_catalog_that_is_lost_or_damaged_is_replaced_by_the_next(tiny: tiny_log.TinyLog) -> None:
    for number, damage in enumerate((b"", b"{}", None), 1):
        tiny.writer.put_catalog(lambda found: found.model_copy(update={"oldest": found.oldest + 1}))
        ref = tiny.log.latest().catalog
        assert ref is not None
        path = tiny.object(ref.key)
        path.unlink() if damage is None else path.write_bytes(damage)
        made = tiny.writer.put_catalog(lambda found: found)
        assert tiny.log.catalog() == made
        assert made.oldest == number


def test_a_catalog_that_no_reader_would_take_is_refused_before_it_is_put(tiny: tiny_log.TinyLog) -> None:
    folds = tuple(tiny_folds.stated_fold(at, at + 1) for at in range(2048))
    keys = list(tiny.log.store.list())
    with pytest.raises(PublishError, match="at most 1048576 are read"):
        tiny.writer.put_catalog(lambda found: found.model_copy(update={"folds": folds}))
    assert list(tiny.log.store.list()) == keys
    idle(tiny.writer)


def test_a_damaged_catalog_that_this_writer_never_read_is_told(tiny: tiny_log.TinyLog) -> None:
    ref = foreign_catalog(tiny, 2)
    pointer.update(tiny.log, lambda at: at.model_copy(update={"catalog": ref}))
    tiny.object(ref.key).unlink()
    with pytest.raises(NotFound, match=ref.key):
        tiny.writer.put_catalog(lambda found: found)


# --- catalogs that a version takes along -----------------------------------------------------------------------------
def older(catalog: Catalog) -> Catalog:
    return catalog.model_copy(update={"oldest": catalog.oldest + 1})


def offer(writer: LogWriter, change: Callable[[Catalog], Catalog] = older) -> None:
    with together(writer.log.store) as batch:
        draft = writer.draft_catalog(change, batch)
    writer.offer_catalog(draft)


def test_a_catalog_that_is_offered_is_named_with_the_next_version_in_one_write(tiny: tiny_log.TinyLog) -> None:
    offer(tiny.writer)
    assert tiny.log.latest().catalog is None and tiny.writer.offered
    sequence = tiny.log.latest().sequence
    idle(tiny.writer)
    assert (tiny.log.latest().version, tiny.log.latest().sequence) == (4, sequence + 1)
    assert tiny.log.catalog().oldest == 1 and not tiny.writer.offered
    idle(tiny.writer)
    assert tiny.log.catalog().oldest == 1


def test_each_catalog_that_is_offered_holds_what_the_one_before_did(tiny: tiny_log.TinyLog) -> None:
    for _ in range(3):
        offer(tiny.writer)
    idle(tiny.writer)
    assert tiny.log.catalog().oldest == 3
    with together(tiny.writer.log.store) as batch:
        offer(tiny.writer)
        offer(tiny.writer)
        later = tiny.writer.draft_catalog(older, batch)
        idle(tiny.writer)  # takes the ones before along
    tiny.writer.offer_catalog(later)
    objects = len([*tiny.log.store.list("catalogs/")])
    idle(tiny.writer)
    assert tiny.log.catalog().oldest == 6
    assert len([*tiny.log.store.list("catalogs/")]) == objects, "it was not made anew"


def test_one_that_no_version_takes_along_is_named_when_that_is_asked_for(tiny: tiny_log.TinyLog) -> None:
    offer(tiny.writer)
    tiny.writer.put_offered()
    assert (tiny.log.latest().version, tiny.log.catalog().oldest) == (3, 1)
    before = tiny.log.latest()
    tiny.writer.put_offered()
    assert tiny.log.latest() == before


@pytest.mark.parametrize("conditional", [True, False])
def test_what_others_wrote_since_it_was_made_is_not_lost(tiny: tiny_log.TinyLog, conditional: bool) -> None:
    writer, _ = writer_on(tiny, conditional=conditional)
    offer(writer)
    offer(writer)
    pointer.update(tiny.log, lambda at: at.model_copy(update={"catalog": foreign_catalog(tiny, 7)}))
    idle(writer)
    assert (tiny.log.latest().version, tiny.log.catalog().oldest) == (4, 9)


def test_under_a_pin_that_came_since_it_is_made_anew(tiny: tiny_log.TinyLog) -> None:
    def change(catalog: Catalog) -> Catalog:
        return catalog.model_copy(update={"oldest": 0 if tiny.writer.pointer.pin is not None else 1})

    offer(tiny.writer, change)
    pointer.update(tiny.log, with_pin(2))
    idle(tiny.writer)
    assert (tiny.log.latest().pin, tiny.log.catalog().oldest) == (2, 0)


def test_a_version_goes_without_a_catalog_that_cannot_be_made_anew(tiny: tiny_log.TinyLog) -> None:
    writer, store = writer_on(tiny, conditional=True)
    offer(writer)
    ref = foreign_catalog(tiny, 7)
    pointer.update(tiny.log, lambda at: at.model_copy(update={"catalog": ref}))

    def fail() -> None:
        raise Unavailable("away")

    idle_once_without_catalogs(writer, store, fail)
    assert (tiny.log.latest().version, tiny.log.catalog().oldest) == (4, 7)
    assert not writer.offered


def idle_once_without_catalogs(writer: LogWriter, store: HookedStore, fail: Callable[[], None]) -> None:
    """Commit a version in which nothing changes, while catalogs cannot be written."""
    put = store.put

    def without(key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        if key.startswith("catalogs/"):
            fail()
        return put(key, data, create=create, over=over)

    store.put = without  # type: ignore[method-assign]
    idle(writer)


def test_a_catalog_whose_version_failed_goes_with_the_next(tiny: tiny_log.TinyLog) -> None:
    writer, store = writer_on(tiny, conditional=True)

    def fail() -> None:
        raise Unavailable("away")

    offer(writer)
    store.before["LATEST"] = fail
    with pytest.raises(Unavailable):
        idle(writer)
    idle(writer)
    assert (tiny.log.latest().version, tiny.log.catalog().oldest) == (4, 1)
