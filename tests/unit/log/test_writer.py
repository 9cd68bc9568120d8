"""What others may say in LATEST is carried over, and a write whose fate is unclear is settled or told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_log
from hooked_store import HookedStore

from tests.unit.log.writers import idle, with_pin, writer_on
from vllm_delta_sync.errors import MalformedObject, RateLimited, RivalWriter, StoreError, Unauthorized, Unavailable
from vllm_delta_sync.log import DeltaLog, LogWriter, pointer
from vllm_delta_sync.log.stamps import Stamps
from vllm_delta_sync.store import ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef


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
