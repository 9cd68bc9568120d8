"""The log in the bucket: reading versions, writing them, materialising and exporting a model at one of them.

Does not know torch or vLLM, and does not touch live weights.
"""

from __future__ import annotations

from vllm_delta_sync.log.packing import TensorUpdate
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.log.schedule import AnchorPolicy, FoldSchedule
from vllm_delta_sync.log.writer import LogWriter

__all__ = ["AnchorPolicy", "DeltaLog", "FoldSchedule", "LogWriter", "TensorUpdate"]
