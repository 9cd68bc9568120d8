"""One writer of a run: rivals are kept out or noticed and named, and what others may say in LATEST is carried over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_log
from hooked_store import HookedStore

from vllm_delta_sync.errors import (
    MalformedObject,
    NotFound,
    RateLimited,
    RivalWriter,
    StoreError,
    Unauthorized,
    Unavailable,
)
from vllm_delta_sync.log import DeltaLog, LogWriter, pointer
from vllm_delta_sync.log.catalogs import put_catalog
from vllm_delta_sync.log.stamps import Stamps
from vllm_delta_sync.store import ObjectInfo, Store, together
from vllm_delta_sync.wire.catalog import Catalog
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import LatestPointer, Manifest, ObjectRef

Change = Callable[[LatestPointer], LatestPointer]


def writer_on(tiny: tiny_log.TinyLog, *, conditional: bool) -> tuple[LogWriter, HookedStore]:
    store = HookedStore(tiny.log.store, conditional=conditional)
    return LogWriter.attach(DeltaLog(store, tiny.log.run)), store


def idle(writer: LogWriter) -> Manifest:
    """Commit a version in which nothing changes."""
    return writer.commit([], state_root=writer.tip.state_root)


def with_pin(version: int | None) -> Change:
    return lambda found: found.model_copy(update={"pin": version})


# --- rivals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("conditional", [True, False])
def test_a_rival_that_comes_later_is_refused_by_the_name_of_both(tiny: tiny_log.TinyLog, conditional: bool) -> None:
    (first, _), (second, _) = (writer_on(tiny, conditional=conditional) for _ in range(2))
    idle(first)
    before = tiny.log.latest()
    with pytest.raises(RivalWriter) as caught:
        idle(second)
    assert before.manifest.key in str(caught.value)
    assert second.pointer.manifest.key in str(caught.value)
    assert tiny.log.latest() == before
    assert [key for key in tiny.log.store.list("versions/") if "/" + f"{4:020d}" in key and "manifest" in key] == [
        before.manifest.key
    ]
    idle(first)


def test_a_rival_at_the_same_moment_is_prevented_where_the_store_has_conditional_writes(
    tiny: tiny_log.TinyLog,
) -> None:
    (first, store), (second, _) = (writer_on(tiny, conditional=True) for _ in range(2))
    store.before["LATEST"] = lambda: idle(second)
    with pytest.raises(RivalWriter, match=r"names version 4 .*another publisher"):
        idle(first)
    assert tiny.log.tip() == second.tip
    idle(second)


def test_of_two_that_write_the_same_version_without_conditions_the_later_sees_the_other(
    tiny: tiny_log.TinyLog,
) -> None:
    (first, store), (second, _) = (writer_on(tiny, conditional=False) for _ in range(2))

    def rival() -> None:
        with pytest.raises(
            RivalWriter,
            match=r"another publisher wrote version 4 \(versions/.*, written 20.* wrote versions/.*manifest",
        ):
            idle(second)

    store.before["LATEST"] = rival
    assert idle(first) == tiny.log.tip()
    assert not store.before


def test_one_that_has_given_up_does_not_stop_the_other(tiny: tiny_log.TinyLog) -> None:
    (first, store), (second, other) = (writer_on(tiny, conditional=False) for _ in range(2))
    both = list[str]()

    def first_lists(prefix: str = "") -> Iterator[str]:
        both.extend(store.inner.list(prefix))
        return iter(both)

    def second_lists(prefix: str = "") -> Iterator[str]:
        with pytest.raises(RivalWriter, match="at the same time"):
            idle(first)
        return iter(both)

    store.list, other.list = first_lists, second_lists  # type: ignore[method-assign]
    assert idle(second) == tiny.log.tip()
    assert len(both) == 4, "a shard and a manifest of each"


def test_a_manifest_that_a_killed_writer_left_is_no_rival(tiny: tiny_log.TinyLog) -> None:
    killed, store = writer_on(tiny, conditional=False)

    def die() -> None:
        raise KeyboardInterrupt

    store.before["LATEST"] = die
    with pytest.raises(KeyboardInterrupt):
        idle(killed)
    assert len([key for key in store.list(f"versions/{4:020d}/") if key.endswith("manifest.json")]) == 1
    resumed, _ = writer_on(tiny, conditional=False)
    assert idle(resumed).version == 4
    assert idle(resumed).version == 5


def test_an_attempt_of_its_own_that_failed_is_no_rival(tiny: tiny_log.TinyLog) -> None:
    store = HookedStore(tiny.log.store, conditional=False)
    log = DeltaLog(store, tiny.log.run)
    writer = LogWriter(log, log.latest(), log.tip(), stamps=Stamps(sleep=lambda _: None))

    def fail() -> None:
        raise Unavailable("away")

    store.before["LATEST"] = fail
    with pytest.raises(Unavailable):
        idle(writer)
    assert idle(writer).version == 4


def test_versions_of_a_branch_that_was_left_are_no_rivals(tiny: tiny_log.TinyLog) -> None:
    third = tiny.log.latest()
    left, _ = writer_on(tiny, conditional=False)
    idle(left)
    idle(left)
    tiny.say(third)
    writer, _ = writer_on(tiny, conditional=False)
    assert [idle(writer).version, idle(writer).version] == [4, 5]
    assert tiny.log.tip() == writer.tip


def test_a_latest_that_cannot_be_read_stops_the_writer(tiny: tiny_log.TinyLog) -> None:
    writer, store = writer_on(tiny, conditional=True)
    store.inner.put("LATEST", b"{}")
    with pytest.raises(RivalWriter, match="nothing that can be read"):
        idle(writer)


# --- what others may say ---------------------------------------------------------------------------------------------
def test_a_pin_is_carried_over_and_an_unpin_too(tiny: tiny_log.TinyLog) -> None:
    pointer.update(tiny.log, with_pin(1))
    idle(tiny.writer)
    assert (tiny.log.latest().version, tiny.log.latest().pin) == (4, 1)
    pointer.update(tiny.log, with_pin(None))
    idle(tiny.writer)
    assert (tiny.log.latest().version, tiny.log.latest().pin) == (5, None)


def test_a_pin_written_over_a_newer_version_does_not_lose_it(tiny: tiny_log.TinyLog) -> None:
    stale = tiny.log.latest()
    newest = idle(tiny.writer)
    tiny.say(stale.model_copy(update={"pin": 2, "sequence": stale.sequence + 1}))
    sequence = tiny.writer.pointer.sequence
    following = idle(tiny.writer)
    assert tiny.log.latest().sequence == sequence + 1
    assert following.parent is not None
    assert tiny.log.manifest(following.parent) == newest
    assert (tiny.log.latest().version, tiny.log.latest().pin) == (5, 2)


def test_a_pin_at_the_same_moment_as_a_version_loses_neither(tiny: tiny_log.TinyLog) -> None:
    writer, store = writer_on(tiny, conditional=True)
    store.before["LATEST"] = lambda: pointer.update(tiny.log, with_pin(2))
    idle(writer)
    assert (tiny.log.latest().version, tiny.log.latest().pin) == (4, 2)


def test_an_older_version_of_another_writer_is_a_rivals(tiny: tiny_log.TinyLog) -> None:
    older = tiny.log.latest()
    idle(tiny.writer)
    resumed, _ = writer_on(tiny, conditional=True)
    tiny.say(older)
    with pytest.raises(RivalWriter, match="names version 3"):
        idle(resumed)


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


CASES = {
    "nothing happened": ({}, {}),
    "a pin": ({"pin": 1, "sequence": 9}, {"pin": 1, "sequence": 9}),
    "another's catalog": ({"catalog": "theirs"}, {"catalog": "theirs"}),
    "a repair to an older one": (
        {"catalog": "old", "version": 2, "manifest": "second", "sequence": 6},
        {"catalog": "old", "sequence": 6},
    ),
    "a repair without a catalog": ({"catalog": None, "sequence": 6}, {"catalog": None, "sequence": 6}),
    "a stale one with an own older catalog": ({"catalog": "old", "version": 2, "manifest": "second"}, {}),
    "a stale one from before any catalog": ({"catalog": None, "version": 2, "manifest": "second"}, {}),
    "a rival's version": ({"manifest": "rival"}, None),
    "another base": ({"base": "rival"}, None),
    "another run": ({"run": "cd" * 16}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_writer_goes_on_from(name: str) -> None:
    words = ("base", "second", "third", "rival", "old", "mine", "theirs")
    refs = {word: ObjectRef(key=word, sha256=f"{number:064x}", size=2) for number, word in enumerate(words)}
    own = LatestPointer(
        run="ab" * 16, sequence=5, version=3, manifest=refs["third"], base=refs["base"], catalog=refs["mine"]
    )

    def changed(fields: dict[str, object]) -> LatestPointer:
        return own.model_copy(update={k: refs.get(v, v) if isinstance(v, str) else v for k, v in fields.items()})

    found, expected = CASES[name]
    manifests = {refs[word].sha256 for word in ("second", "third")}
    catalogs = {refs[word].sha256 for word in ("old", "mine")}
    result = pointer.carried(own, changed(found), manifests, catalogs)
    assert result == (None if expected is None else changed(expected))


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


# --- writes whose fate is unclear ------------------------------------------------------------------------------------
class Unclear(HookedStore):
    """A store without conditional writes whose next write of LATEST fails, and arrives when `arrive` is called."""

    def __init__(self, inner: Store, error: StoreError) -> None:
        super().__init__(inner, conditional=False)
        self.error: StoreError | None = error
        self.held = b""

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        if key == "LATEST" and self.error is not None:
            self.held, error, self.error = bytes(data), self.error, None
            raise error
        return super().put(key, data, create=create, over=over)

    def arrive(self) -> None:
        self.inner.put("LATEST", self.held)


def unclear(tiny: tiny_log.TinyLog, error: StoreError, sleep: Callable[[float], object]) -> tuple[LogWriter, Unclear]:
    store = Unclear(tiny.log.store, error)
    log = DeltaLog(store, tiny.log.run)
    return LogWriter(log, log.latest(), log.tip(), stamps=Stamps(sleep=sleep)), store


def test_a_write_that_arrives_late_is_waited_for_where_nothing_would_refuse_it(tiny: tiny_log.TinyLog) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            store.arrive()

    writer, store = unclear(tiny, Unavailable("no answer"), sleep)
    assert idle(writer) == tiny.log.tip()
    assert slept == [1.0, 2.0, 4.0]


def test_a_version_that_arrives_after_another_took_its_place_is_overwritten(tiny: tiny_log.TinyLog) -> None:
    writer, store = unclear(tiny, Unavailable("no answer"), lambda seconds: None)
    with pytest.raises(Unavailable):
        idle(writer)
    fourth = idle(writer)
    store.arrive()
    assert tiny.log.tip() != fourth
    fifth = idle(writer)
    assert fifth.parent is not None
    assert tiny.log.manifest(fifth.parent) == fourth
    assert tiny.log.tip() == fifth


def test_a_version_that_arrives_before_another_took_its_place_stands(tiny: tiny_log.TinyLog) -> None:
    writer, store = unclear(tiny, Unavailable("no answer"), lambda seconds: None)
    with pytest.raises(Unavailable):
        idle(writer)
    store.arrive()
    with pytest.raises(RivalWriter, match="arrived after all"):
        idle(writer)
    assert tiny.log.tip().version == 4


@pytest.mark.parametrize("error", [Unauthorized("no"), RateLimited("no", 9.0)], ids=["unauthorized", "rate limited"])
def test_a_refused_write_is_not_asked_about_and_the_next_goes_on(tiny: tiny_log.TinyLog, error: StoreError) -> None:
    asked: list[float] = []
    writer, _ = unclear(tiny, error, asked.append)
    with pytest.raises(type(error)):
        idle(writer)
    assert asked == []
    assert idle(writer) == tiny.log.tip()


# --- changing LATEST -------------------------------------------------------------------------------------------------
def test_a_change_is_made_of_what_latest_says_at_that_moment(tiny: tiny_log.TinyLog) -> None:
    store = HookedStore(tiny.log.store)
    log = DeltaLog(store, tiny.log.run)
    store.before["LATEST"] = lambda: idle(tiny.writer)
    seen = pointer.update(log, with_pin(1))
    assert seen.pointer == tiny.log.latest()
    assert (seen.pointer.version, seen.pointer.pin, seen.pointer.sequence) == (4, 1, 5)
    assert pointer.look(log, seen) is seen


def test_a_change_that_is_no_latest_is_refused_and_not_written(tiny: tiny_log.TinyLog) -> None:
    before = tiny.log.latest()
    with pytest.raises(MalformedObject, match="pinned to version 9"):
        pointer.update(tiny.log, with_pin(9))
    assert tiny.log.latest() == before


def test_without_conditions_what_came_while_a_change_was_made_is_not_overwritten(tiny: tiny_log.TinyLog) -> None:
    log = DeltaLog(HookedStore(tiny.log.store, conditional=False), tiny.log.run)
    seen = pointer.look(log)
    idle(tiny.writer)
    turns: list[int] = []

    def slow(found: LatestPointer) -> LatestPointer:
        turns.append(found.version)
        if len(turns) == 2:
            idle(tiny.writer)
        return found.model_copy(update={"pin": 1})

    pointer.update(log, slow, seen)
    assert turns == [3, 4, 5]
    assert (tiny.log.latest().version, tiny.log.latest().pin) == (5, 1)


def test_a_latest_that_never_stands_still_is_given_up(tiny: tiny_log.TinyLog) -> None:
    store = HookedStore(tiny.log.store)

    def again() -> None:
        idle(tiny.writer)
        store.before["LATEST"] = again

    again()
    with pytest.raises(Unavailable, match="10 times in a row"):
        pointer.update(DeltaLog(store, tiny.log.run), with_pin(1))
