"""Every setting of the server side, with its default and its unit.

Does not read files or explain mistakes: `loading` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vllm_delta_sync.config.base import Settings
from vllm_delta_sync.config.stores import AbsolutePath, SharedStoreConfig, settings_of_uri


class DeltaSyncConfig(Settings):
    """Every setting of the server side, with its default."""

    store: SharedStoreConfig = Field(discriminator="kind")
    """The bucket to follow: a URI such as `s3://bucket/run-42` or `file:///mnt/bucket`, an absolute path, or a mapping
    with its `kind`."""

    store_timeout_s: float = Field(default=60.0, ge=1)
    """Seconds that one call to the store may take, besides one second for each MiB that it moves."""

    cache_dir: AbsolutePath | None = None
    """Folder in which the servers of this host share what they fetched; null: `vllm-delta-sync` in the user's cache
    folder, or none for a store that is a directory itself."""

    cache_bytes: int = Field(default=16 << 30, ge=0)
    """Bytes that the folder may hold; 0 keeps nothing, and every rank fetches for itself."""

    run: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """Follow this run (32 hex digits) whatever the bucket's RUN says; null follows RUN."""

    poll_interval_s: float = Field(default=5.0, ge=0.05)
    """Seconds between two looks at LATEST."""

    start: Literal["catch_up", "serve_base"] = "catch_up"
    """`catch_up` takes no request before the version that is latest at start is served; `serve_base` starts at once."""

    catch_up_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that `catch_up` may take before the start fails."""

    kv_cache: Literal["keep", "reset_prefix", "recompute"] = "reset_prefix"
    """After a commit: `keep` every block, let no *later* request reuse an old block (`reset_prefix`), or also
    `recompute` the requests that are running."""

    kernel: Literal["auto", "native", "triton", "reference"] = "auto"
    """`native` refuses to start without the compiled library, `reference` never uses it, `auto` takes what there is."""

    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads that write one commit, per rank; a GPU needs none."""

    max_staged_bytes: int = Field(default=8 << 30, ge=1 << 20)
    """Bytes, per rank, that the changes of one step may take while they wait for its commit. An element of two bytes
    that changes takes eight. Host memory, but for what a GPU holds of them."""

    device_staged_bytes: int | None = Field(default=None, ge=1 << 20)
    """Bytes of a GPU's memory, per rank, set aside at the start for the changes of one step and for undoing it; so much
    less is left to vLLM's KV cache. What a step takes beyond waits in pinned host memory, and is committed at the
    speed of the bus. null: a sixteenth of the weights. Never more than `max_staged_bytes`."""

    unmapped: Literal["refuse", "ignore"] = "refuse"
    """What to do about published tensors that the serving model never loads."""

    on_error: Literal["keep_serving", "stop"] = "keep_serving"
    """Whether a server that cannot follow keeps serving its last good version or stops."""

    audit_every: int = Field(default=0, ge=0)
    """Versions between two full passes over the live weights; 0 audits on demand only."""

    commit_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for all ranks to answer a commit before the engine is taken for poisoned."""

    def cache_folder(self, environ: Mapping[str, str] = os.environ) -> Path | None:
        """Where the node's cache is, by `cache_dir`, XDG_CACHE_HOME or ~/.cache; None for no cache."""
        if not self.cache_bytes or (self.cache_dir is None and self.store.kind == "file"):
            return None
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-delta-sync"

    @model_validator(mode="before")
    @classmethod
    def _store_from_uri(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("store"), str):
            return data
        store = settings_of_uri(data["store"])
        if store["kind"] == "memory":
            raise ValueError(f"store {data['store']!r} lives in one process, so no server can follow it")
        return {**data, "store": store}
