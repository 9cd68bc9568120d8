"""Holds a deadline over a call that has none of its own.

Does not retry, and cannot end a call: one that does not look whether it was abandoned is left behind in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vllm_delta_sync.errors import Unavailable

_T = TypeVar("_T")


def call_within(seconds: float, what: str, call: Callable[[], _T], abandoned: threading.Event | None = None) -> _T:
    """Return what `call` returns, or raise what it raises, if it ends within `seconds`.

    Args:
        seconds: the deadline.
        what: what is done and where, for the message.
        call: runs in a daemon thread.
        abandoned: set when the deadline has passed; `call` should look at it where it could end.

    Raises:
        Unavailable: the deadline has passed.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="store-call", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():  # the call's own error, or it ended at that very moment
            return outcome.result()
        if abandoned is not None:
            abandoned.set()
        raise Unavailable(
            f"{what}: no answer within {seconds:g} s; the store, or the network on the way to it, hangs"
        ) from None
