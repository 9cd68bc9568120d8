"""The trainer side: what changed since the last publish, written to the log in the background.

Does not import vLLM; talks to no engine.
"""

from __future__ import annotations

from vllm_delta_sync.trainer.publication import Publication, Published
from vllm_delta_sync.trainer.publisher import Publisher

__all__ = ["Publication", "Published", "Publisher"]
