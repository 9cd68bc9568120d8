"""The command under way: its number, which late answers do not carry, and which ranks have answered.

Pure: no I/O, no clock. Does not decide what comes next: `controller` does.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import EngineFailed, Event, Send, Traced
from vllm_delta_sync.serving.messages import Message

_NUMBERED = (
    msg.BaseLoaded, msg.Proved, msg.Located, msg.Holding, msg.Planned, msg.Staged, msg.Failed, Traced, EngineFailed,
)  # fmt: skip


class Attempts:
    """One command at a time.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.number = 0
        self.replies: dict[int, Message] = {}  # of the command under way, by rank
        self._ranks = ranks

    def begin(self, message: Message, rank: int | None = None) -> Send:
        """A new attempt, with this command to one rank, or to all."""
        self.number += 1
        self.replies.clear()
        return Send(replace(message, attempt=self.number), rank)

    def is_late(self, event: Event) -> bool:
        """Whether it answers something that was given up. Audits have numbers of their own."""
        of_audit = isinstance(event, msg.Failed) and event.command == msg.Audit.kind
        return isinstance(event, _NUMBERED) and event.attempt != self.number and not of_audit

    def complete(self, reply: Message, rank: int) -> bool:
        """Take note of an answer; whether all ranks have answered."""
        self.replies[rank] = reply
        return len(self.replies) == self._ranks

    def staged(self) -> list[msg.Staged]:
        """What all ranks have staged, by rank."""
        found = [self.replies[rank] for rank in range(self._ranks)]
        return [reply for reply in found if isinstance(reply, msg.Staged)]
