"""Messages survive the channel; strangers do not get in."""

from __future__ import annotations

import queue
import threading
import time
from multiprocessing import AuthenticationError

import numpy as np
import pytest

from tests.unit.serving.orders import hop, latest, place, ref
from vllm_delta_sync.errors import MalformedObject, UnsupportedEngine
from vllm_delta_sync.serving import channel, framing
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.channel import Hub, Spoke

LANES = np.array([[1, 2, 3, 2**32 - 1], [0, 5, 6, 7]], dtype=np.uint32)


@pytest.mark.parametrize(
    "message",
    [
        msg.Tip(latest(3, pin=1)),
        msg.LoadBase("r", ref(0)),
        msg.BaseLoaded(True),
        msg.Stage(hop(3)),
        msg.Stage(hop(3, 7)),
        msg.Plan(latest(3), None, hop(3, kind="anchor"), False),
        msg.Plan(latest(3), place(2), hop(3), True),
        msg.Planned(hop(0, kind="anchor")),
        msg.Locate(latest(0), LANES, (1, 2)),
        msg.Proved(LANES, 0.5),
        msg.Staged(3, (0, 4), LANES, (1,), LANES[:1], 9, 0, "disk full", 8, None, 0.1, 0.2),
        msg.Audited(1, 3, ("a", "b"), LANES, 0.1),
        msg.Failed("stage", None, "digest", "why"),
        msg.Located(None, LANES, "why"),
        msg.Joined(place(3), LANES),
        msg.Joined(None, LANES),
        msg.Holding(place(3)),
        msg.Drop(),
    ],
)
def test_a_message_comes_back_as_it_went(message: msg.Message) -> None:
    back = framing.from_bytes(framing.to_bytes(message))
    assert type(back) is type(message)
    for name, value in vars(message).items():
        assert (
            np.array_equal(value, getattr(back, name))
            if isinstance(value, np.ndarray)
            else value == getattr(back, name)
        )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"kind":"nope"}',
        b'{"kind":"drop","extra":1}',
        b'{"kind":"stage"}',
        b'{"kind":"stage","hop":"{}"}',
        b"\xff",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedObject):
        framing.from_bytes(data)


@pytest.fixture
def hub() -> object:
    events: queue.Queue[tuple[int, msg.Message]] = queue.Queue()
    hub = Hub(lambda rank, message: events.put((rank, message)))
    yield hub, events
    hub.close()


def test_ranks_and_controller_reach_each_other(hub: tuple[Hub, queue.Queue[tuple[int, msg.Message]]]) -> None:
    centre, events = hub
    spokes = [Spoke(centre.address, centre.authkey, rank) for rank in (0, 1)]
    centre.wait_for(2, 5.0)
    centre.broadcast(msg.Stage(hop(1)))
    assert [spoke.receive() for spoke in spokes] == [msg.Stage(hop(1))] * 2
    spokes[1].send(msg.BaseLoaded(False))
    assert events.get(timeout=5) == (1, msg.BaseLoaded(False))
    spokes[0].close()
    rank, lost = events.get(timeout=5)
    assert rank == 0 and isinstance(lost, msg.Lost)


@pytest.mark.parametrize("leaves", ["engine", "rank"])
def test_whoever_waits_for_a_message_sees_that_either_end_has_left(
    leaves: str, hub: tuple[Hub, queue.Queue[tuple[int, msg.Message]]]
) -> None:
    centre, events = hub
    spoke = Spoke(centre.address, centre.authkey, 0)
    centre.wait_for(1, 5.0)
    waiting = threading.Event()

    def listen() -> None:
        waiting.set()
        with pytest.raises(EOFError):
            spoke.receive()

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    waiting.wait(5)
    time.sleep(0.1)  # until it waits inside the system's call
    (centre if leaves == "engine" else spoke).close()
    listening.join(5)
    assert not listening.is_alive()
    if leaves == "rank":
        assert isinstance(events.get(timeout=5)[1], msg.Lost)


def test_a_rank_that_is_not_understood_is_told_that_nobody_hears_it(
    hub: tuple[Hub, queue.Queue[tuple[int, msg.Message]]],
) -> None:
    centre, events = hub
    spoke = Spoke(centre.address, centre.authkey, 0)
    spoke._connection.send_bytes(b"of another release")
    lost = events.get(timeout=5)[1]
    assert isinstance(lost, msg.Lost) and lost.text.startswith("MalformedObject")

    def speak() -> None:
        with pytest.raises(OSError):
            while True:
                spoke.send(msg.BaseLoaded(False))

    speaking = threading.Thread(target=speak, daemon=True)
    speaking.start()
    speaking.join(5)
    assert not speaking.is_alive()


def test_a_stranger_without_the_key_is_turned_away(hub: tuple[Hub, queue.Queue[tuple[int, msg.Message]]]) -> None:
    centre, events = hub
    with pytest.raises(AuthenticationError):
        Spoke(centre.address, b"guessed", 0)
    Spoke(centre.address, centre.authkey, 0).send(msg.BaseLoaded(False))
    assert events.get(timeout=5) == (0, msg.BaseLoaded(False))


def test_closing_does_not_wait_for_an_answer_when_nobody_listens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ACCEPT_PAUSE_S", 0.5)
    centre = Hub(lambda rank, message: None)
    with pytest.raises(AuthenticationError):
        Spoke(centre.address, b"guessed", 0)
    # Whoever listens pauses now, and will find that it has closed.
    closing = threading.Thread(target=centre.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()


def test_an_engine_that_is_shut_down_twice_closes_twice() -> None:
    centre = Hub(lambda rank, message: None)
    centre.close()
    centre.close()


def test_a_rank_that_never_comes_is_said(hub: tuple[Hub, queue.Queue[tuple[int, msg.Message]]]) -> None:
    with pytest.raises(UnsupportedEngine, match="0 of 1 ranks"):
        hub[0].wait_for(1, 0.05)
