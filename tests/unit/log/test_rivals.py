"""Of two publishers of one run the second to write stops and names the other, on any kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_log
from hooked_store import HookedStore

from tests.unit.log.writers import idle, writer_on
from vllm_delta_sync.errors import RivalWriter, Unavailable
from vllm_delta_sync.log import DeltaLog, LogWriter
from vllm_delta_sync.log.stamps import Stamps


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


def test_an_older_version_of_another_writer_is_a_rivals(tiny: tiny_log.TinyLog) -> None:
    older = tiny.log.latest()
    idle(tiny.writer)
    resumed, _ = writer_on(tiny, conditional=True)
    tiny.say(older)
    with pytest.raises(RivalWriter, match="names version 3"):
        idle(resumed)
