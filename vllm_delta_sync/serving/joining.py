"""The way from the base of a run to weights whose hashes are known: which command follows which answer.

Pure: no I/O, no clock. Does not say what becomes of the outcome: `controller` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import Traced
from vllm_delta_sync.serving.messages import Message
from vllm_delta_sync.serving.proof import Proof
from vllm_delta_sync.wire.manifest import LatestPointer


class Joining:
    """One join at a time; the map of the tensors outlives it, for runs of the same ones.

    Args:
        ignore_unmapped: policy for published tensors that no rank loads.
    """

    def __init__(self, *, ignore_unmapped: bool) -> None:
        self._ignore_unmapped = ignore_unmapped
        self._pointer: LatestPointer | None = None
        self._proof: Proof | None = None
        self.mismatch = ""  # why the weights are of no version, if they are not

    @property
    def run(self) -> str:
        """The run that is joined."""
        return self.pointer.run

    @property
    def pointer(self) -> LatestPointer:
        """What LATEST said when the join began."""
        assert self._pointer is not None
        return self._pointer

    @property
    def proof(self) -> Proof:
        assert self._proof is not None
        return self._proof

    def begin(self, pointer: LatestPointer) -> Message:
        self._pointer = pointer
        return msg.LoadBase(pointer.run, pointer.base)

    def base_loaded(self, replies: Iterable[Message]) -> Message | None:
        """None when the layout has to be traced, as it has not where the tensors are the same as before."""
        known = all(isinstance(reply, msg.BaseLoaded) and reply.traced for reply in replies)
        return msg.Prove() if known else None

    def traced(self, event: Traced) -> Message:
        """Raises what `Proof.of_layouts` raises."""
        self._proof = Proof.of_layouts(event.layouts, event.specs, ignore_unmapped=self._ignore_unmapped)
        return msg.Prove()

    def proved(self, replies: Mapping[int, Message]) -> Message:
        """To the leader. Raises StateHashMismatch when copies of weights differ."""
        lanes = {rank: reply.lanes for rank, reply in replies.items() if isinstance(reply, msg.Proved)}
        return msg.Locate(self.pointer, self.proof.sum(lanes), self.proof.skipped)

    def located(self, event: msg.Located) -> Message:
        self.mismatch = event.text
        return msg.Joined(event.place, event.lanes)
