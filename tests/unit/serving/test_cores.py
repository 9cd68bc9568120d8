"""Background threads leave the cores that compute tokens, where there are others."""

from __future__ import annotations

import os
import threading

import pytest

from vllm_delta_sync.serving import cores

ALL = os.sched_getaffinity(0)


def _in_a_thread(first: int, then: frozenset[int]) -> set[int]:
    """Where a thread that began bound to `first` may run after it was moved."""
    found: list[set[int]] = []

    def run() -> None:
        os.sched_setaffinity(0, {first})
        cores.move_to(then)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_process_computes_on_the_cores_of_all_its_threads() -> None:
    assert cores.of_this_process() == ALL


@pytest.mark.skipif(len(ALL) < 2, reason="one core: there is none to move to")
def test_a_bound_thread_moves_to_the_cores_it_is_given() -> None:
    bound, *others = sorted(ALL)
    assert _in_a_thread(bound, frozenset(others)) == set(others)


def test_without_cores_or_with_such_that_do_not_exist_a_thread_stays() -> None:
    bound = min(ALL)
    assert _in_a_thread(bound, frozenset()) == {bound}
    assert _in_a_thread(bound, frozenset({1 << 12})) == {bound}
