"""How things are timed here: in turns, from a cold cache, by the median.

Does not know what it times.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from vllm_delta_sync import native

EVICTION_BYTES = 256 << 20  # several times any L3
TURN_SECONDS, TURN_RUNS = 0.4, 5  # a contender runs until it took so long, or so often: quick ones vary most


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender over the runs of `rounds` turns, each begun with a cache full of other data.

    Taking turns means that a slow spell of the machine falls on all of them.
    """
    other = np.ones(EVICTION_BYTES, np.uint8)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: a collection of all that was imported falls on whoever happens to be at work
    try:
        for _ in range(rounds):
            for name, run in contenders.items():
                spent, runs = 0.0, 0
                while spent < TURN_SECONDS and runs < TURN_RUNS:
                    native.read_sum(other)
                    start = time.perf_counter()
                    run()
                    taken[name].append(time.perf_counter() - start)
                    spent, runs = spent + taken[name][-1], runs + 1
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
