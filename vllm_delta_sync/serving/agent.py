"""A rank's background threads: one hears the controller's commands, and on the leader one watches the bucket.

Holds no weights, decides nothing and carries nothing out (`commands` does). Runs on cores that do not compute tokens
when there are any, and always at the priority of the threads that do: at a lower one it would be put aside while it
holds Python's lock, and they would wait all the longer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

from vllm_delta_sync.config import DeltaSyncConfig
from vllm_delta_sync.errors import MalformedObject, UnsupportedEngine
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.serving import cores
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.channel import Spoke
from vllm_delta_sync.serving.commands import Commands
from vllm_delta_sync.serving.controller import LEADER
from vllm_delta_sync.serving.follower import Follower
from vllm_delta_sync.serving.messages import Message
from vllm_delta_sync.serving.rank import Rank
from vllm_delta_sync.store import open_store

LOOK_MARGIN_S = 5.0  # a look is given up when the store has missed its own deadline by as much

logger = logging.getLogger("vllm.delta_sync")


class Agent:
    """Connects one rank to its engine's controller.

    Args:
        rank: whose background work this is.
        config: which bucket to follow, and how often to look.
        spare: cores that no rank computes on.
    """

    def __init__(self, rank: Rank, config: DeltaSyncConfig, address: str, authkey: bytes, spare: Iterable[int]) -> None:
        self._rank = rank
        self._config = config
        self._cores = frozenset(spare) or cores.of_this_process()
        self._store = open_store(config.store, timeout_s=config.store_timeout_s)
        self._commands = Commands(rank, lambda run: DeltaLog.open(self._store, run=run))
        self._spoke = Spoke(address, authkey, rank.number)
        self._follower: Follower | None = None

    def start(self) -> None:
        """Start the command thread, and on the leader the polling thread."""
        if self._rank.number == LEADER:
            config = self._config
            self._follower = Follower(
                lambda: DeltaLog.open(self._store, run=config.run),
                self._spoke.send,
                config.poll_interval_s,
                must_exist=config.run is not None,
                deadline_s=config.store_timeout_s + LOOK_MARGIN_S,
            )
            self._in_background(self._follower.run, "delta-sync-follower")
        self._in_background(self._serve, f"delta-sync-commands-{self._rank.number}")

    def want_audit(self) -> None:
        self._spoke.send(msg.WantAudit())

    def _serve(self) -> None:
        try:
            while True:
                command = self._spoke.receive()
                if isinstance(command, msg.Audit):  # long; staging goes on beside it
                    self._in_background(partial(self._answer, command), "delta-sync-audit")
                else:
                    self._answer(command)
        except (EOFError, OSError):  # the engine is gone, and mostly this process soon
            return
        except MalformedObject as error:
            raise UnsupportedEngine(f"the engine runs another release of vllm-delta-sync: {error}") from error
        finally:
            if self._follower is not None:
                self._follower.stop()

    def _answer(self, command: Message) -> None:
        reply = self._commands.answer(command)
        if reply is not None:
            self._spoke.send(reply)

    def _in_background(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            cores.move_to(self._cores)
            try:
                work()
            except Exception:
                # Without this thread the rank is deaf: let the controller see it leave, rather than wait for it.
                logger.exception("delta-sync: %s ended", name)
                self._spoke.close()

        threading.Thread(target=run, name=name, daemon=True).start()
