"""Carries messages between the ranks and the controller over a unix socket, beside vLLM's own queues.

Out of band on purpose: a status RPC through the engine would drain the batches in flight. Knows nothing of what the
messages mean. Both ends authenticate with a key that travelled inside vLLM's own RPC, and the socket lies in a folder
that only this user can enter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from vllm_delta_sync.errors import MalformedObject, UnsupportedEngine
from vllm_delta_sync.serving import framing
from vllm_delta_sync.serving.messages import Lost, Message

MAX_MESSAGE_BYTES = 1 << 28
ACCEPT_PAUSE_S = 0.05  # after a failed accept, which may be one that fails at once and for ever


class Hub:
    """The controller's end: one connection per rank.

    Args:
        deliver: called from a reader thread with (rank, message), in the order in which that rank sent them.
    """

    def __init__(self, deliver: Callable[[int, Message], None]) -> None:
        self._deliver = deliver
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-delta-sync-")  # mode 0700
        self.authkey = secrets.token_bytes(32)
        self._listener = Listener(str(Path(self._folder.name) / "hub.sock"), family="AF_UNIX", authkey=self.authkey)
        self.address = str(self._listener.address)
        self._ranks: dict[int, Connection] = {}
        self._arrived = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept, name="delta-sync-hub", daemon=True).start()

    def wait_for(self, ranks: int, timeout: float) -> None:
        """Block until that many ranks are connected; raises UnsupportedEngine after `timeout` seconds."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._ranks) >= ranks, timeout):
                raise UnsupportedEngine(
                    f"only {len(self._ranks)} of {ranks} ranks reached the engine's socket {self.address} within "
                    f"{timeout:.0f} s; ranks on other hosts are not supported"
                )

    def broadcast(self, message: Message) -> None:
        for rank in sorted(self._ranks):
            self.send(rank, message)

    def send(self, rank: int, message: Message) -> None:
        try:
            self._ranks[rank].send_bytes(framing.to_bytes(message))
        except (OSError, KeyError) as error:
            self._deliver(rank, Lost(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """May be called again."""
        self._closed = True
        # An accept that waits is not woken by closing its socket. If none does any more, nobody answers: so without a
        # handshake, and without waiting.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            caller.connect(self.address)
        while self._ranks:
            _hang_up(self._ranks.popitem()[1])
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
                rank = int.from_bytes(connection.recv_bytes(8), "little")
            except Exception:  # a stranger without the key, one that left, or the listener was closed
                time.sleep(ACCEPT_PAUSE_S)
                continue
            with self._arrived:
                self._ranks[rank] = connection
                self._arrived.notify_all()
            threading.Thread(
                target=self._read, args=(rank, connection), name=f"delta-sync-rank-{rank}", daemon=True
            ).start()

    def _read(self, rank: int, connection: Connection) -> None:
        while True:
            try:
                message = framing.from_bytes(connection.recv_bytes(MAX_MESSAGE_BYTES))
            except (OSError, EOFError, MalformedObject) as error:
                if not self._closed:
                    self._deliver(rank, Lost(f"{type(error).__name__}: {error}"))
                _hang_up(connection)  # so that the rank does not speak on, and wait, where nobody hears it
                return
            self._deliver(rank, message)


class Spoke:
    """One rank's end. `send` may be called from any thread; `receive` from one."""

    def __init__(self, address: str, authkey: bytes, rank: int) -> None:
        self._connection = Client(address, family="AF_UNIX", authkey=authkey)
        self._connection.send_bytes(rank.to_bytes(8, "little"))
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            self._connection.send_bytes(framing.to_bytes(message))

    def receive(self) -> Message:
        """Block for the next message; raises EOFError or OSError when the engine is gone."""
        return framing.from_bytes(self._connection.recv_bytes(MAX_MESSAGE_BYTES))

    def close(self) -> None:
        """Leave, also while `receive` blocks: that raises, and the controller is told."""
        _hang_up(self._connection)


def _hang_up(connection: Connection) -> None:
    """End a connection for whoever waits at either of its ends, which closing it does not: it goes when they let go."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
