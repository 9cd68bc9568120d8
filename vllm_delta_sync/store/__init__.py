"""Object stores: the protocol, the local directory, and opening one by URI.

Does not know what the objects mean.
"""

from __future__ import annotations

from vllm_delta_sync.store.batch import Batch, together
from vllm_delta_sync.store.protocol import Content, Dated, Filed, ObjectInfo, Store
from vllm_delta_sync.store.registry import open_store
from vllm_delta_sync.store.within import child

__all__ = ["Batch", "Content", "Dated", "Filed", "ObjectInfo", "Store", "child", "open_store", "together"]
