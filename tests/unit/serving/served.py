"""A whole engine but for vLLM: follower, controller and ranks of the fleet's little model, in one thread.

What the engine thread does (trace, commit, roll back) is done here as `attached` does it. Holds no assertions.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch

from tests.unit.serving.fleet import PADDING, Fleet
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.serving import framing
from vllm_delta_sync.serving.actions import Action, Adopt, Commit, Committed, Event, Send, Tick, Trace, Traced
from vllm_delta_sync.serving.commands import Commands
from vllm_delta_sync.serving.controller import Controller
from vllm_delta_sync.serving.follower import Follower
from vllm_delta_sync.serving.state import Status
from vllm_delta_sync.store import Store, open_store


class Served(Fleet):
    """An engine that follows a bucket.

    Args:
        bucket: what to follow.
        served: what the ranks have loaded.
        limit: max_staged_bytes.
        cache: what the ranks share.
        padding: to a multiple of which they pad the vocabulary.
    """

    def __init__(
        self,
        bucket: Path | Store,
        served: dict[str, torch.Tensor],
        ranks: int = 2,
        limit: int = 1 << 30,
        cache: NodeCache | None = None,
        audit_every: int = 0,
        padding: int = PADDING,
    ) -> None:
        super().__init__(served, ranks, limit=limit, cache=cache, padding=padding)
        self.store = open_store(str(bucket)) if isinstance(bucket, Path) else bucket
        self.now = 1000.0
        self.controller = Controller(ranks, ignore_unmapped=False, stop_on_error=False, audit_every=audit_every)
        self.commands = [Commands(rank, lambda run: DeltaLog.open(self.store, run=run)) for rank in self.ranks]
        self.follower = Follower(
            lambda: DeltaLog.open(self.store),
            lambda message: self._events.append((0, message)),
            1.0,
            deadline_s=20.0,
            clock=lambda: self.now,
        )
        self.traces = 0
        self.adopted: list[tuple[str, int]] = []
        self.passed: list[int] = []  # every version committed
        self._events: deque[tuple[int, Event]] = deque()

    @property
    def status(self) -> Status:
        return self.controller.status

    def look(self, seconds: float = 0.0) -> None:
        """Let time pass, look at LATEST once, and do all that follows from it."""
        self.now += seconds
        self.follower.poll()
        self._events.append((0, Tick()))
        while self._events:
            rank, event = self._events.popleft()
            for action in self.controller.handle(event, self.now, rank):
                self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(message, rank):
                for number in range(len(self.ranks)) if rank is None else (rank,):
                    # As bytes, as it goes over the channel.
                    reply = self.commands[number].answer(framing.from_bytes(framing.to_bytes(message)))
                    if reply is not None:
                        self._events.append((number, framing.from_bytes(framing.to_bytes(reply))))
            case Trace(attempt):
                self.traces += 1
                layouts = tuple(rank.trace(model) for rank, model in zip(self.ranks, self.models, strict=True))
                base = self.ranks[0].base
                assert base is not None
                self._events.append((0, Traced(attempt, base.tensors, layouts)))
            case Commit(_, version):
                self._events.append((0, self._commit(version)))
            case Adopt(run, version):
                self.adopted.append((run, version))

    def _commit(self, version: int) -> Committed:
        try:
            self.commit(version)
        except DeltaSyncError as error:
            for rank in self.ranks:
                rank.rollback(version)
            return Committed(version, 0.0, (error.cause, str(error)))
        self.passed.append(version)
        return Committed(version, 0.0)
