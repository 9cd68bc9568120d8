"""Carries out the controller's commands on one rank; whatever goes wrong becomes an answer.

Has no thread and no channel (`agent` does), and decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from vllm_delta_sync.errors import DeltaSyncError, RateLimited, UnsupportedEngine
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.route import Route
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.locate import locate
from vllm_delta_sync.serving.messages import Message, Place
from vllm_delta_sync.serving.rank import Rank
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer

logger = logging.getLogger("vllm.delta_sync")


class Commands:
    """What one rank does when it is told to.

    Args:
        rank: whose weights it is about.
        open_log: opens a run of the log by its id.
    """

    def __init__(self, rank: Rank, open_log: Callable[[str], DeltaLog]) -> None:
        self._rank = rank
        self._open_log = open_log
        self._route: Route | None = None

    def answer(self, command: Message) -> Message | None:
        """Carry out a command; returns what to tell the controller, if anything."""
        version = command.hop.to if isinstance(command, msg.Stage) else None
        reply: Message | None
        try:
            reply = self._carry_out(command)
        except DeltaSyncError as error:
            patience = error.retry_after if isinstance(error, RateLimited) else 0.0
            reply = msg.Failed(command.kind, version, error.cause, str(error), patience)
        except Exception as error:  # a defect: the server serves on, and says what happened
            logger.exception("delta-sync: %s failed", command.kind)
            reply = msg.Failed(command.kind, version, "internal", f"{type(error).__name__}: {error}")
        return None if reply is None else replace(reply, attempt=command.attempt)

    def _carry_out(self, command: Message) -> Message | None:
        rank = self._rank
        match command:
            case msg.LoadBase(run, base):
                log = self._open_log(run)
                self._route = Route(log)
                return msg.BaseLoaded(rank.load_base(log, base))
            case msg.Prove():
                return rank.prove()
            case msg.Locate(pointer, lanes, skip):
                assert rank.log is not None and rank.base is not None
                return locate(rank.log, pointer, rank.base, lanes, skip)
            case msg.Joined(place, lanes):
                rank.join(place, lanes)
                return msg.Holding(place)
            case msg.Plan(pointer, held, failed, too_large):
                return msg.Planned(self._plan(pointer, held, failed, too_large))
            case msg.Stage(hop):
                return rank.stage(hop)
            case msg.Audit(number):
                return rank.audit(number)
            case msg.Drop():
                rank.drop()
                return None
        raise UnsupportedEngine(f"rank {rank.number} was told {command.kind!r}, which this release does not know")

    def _plan(self, pointer: LatestPointer, held: Place | None, failed: Hop | None, too_large: bool) -> Hop:
        assert self._route is not None
        if failed is not None and too_large:
            self._route.take_less(failed)
        elif failed is not None:
            self._route.avoid(failed)
        ref, version = (held.ref, held.version) if held else (None, None)
        hop = self._route.next_hop(pointer, ref, version, pointer.goal)
        assert hop is not None, f"a way from version {version} to itself"
        return hop
