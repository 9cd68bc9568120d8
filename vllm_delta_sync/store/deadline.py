"""Holds a deadline over a call that has none of its own.

Does not retry, and cannot end a call that ignores its cancellation: such a call is left behind in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vllm_delta_sync.errors import Unavailable

_T = TypeVar("_T")


def call_within(seconds: float, what: str, call: Callable[[], _T], cancel: Callable[[], object] | None = None) -> _T:
    """Return what `call` returns, or raise what it raises, if it ends within `seconds`.

    Args:
        seconds: the deadline.
        what: what is done and where, for the message.
        call: runs in a daemon thread.
        cancel: called once, in another thread, when the deadline has passed; should make `call` end soon.

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
        if outcome.done():  # the call's own error, not the deadline
            raise
        if cancel is not None:
            threading.Thread(target=cancel, name="store-cancel", daemon=True).start()
        raise Unavailable(
            f"{what}: no answer within {seconds:g} s; the store, or the network on the way to it, hangs"
        ) from None
