"""The worker extension: what vLLM mixes into every worker for `--worker-extension-cls vllm_delta_sync.WorkerExtension`.

A thin shell: it finds the model, keeps one `Rank` and one `Agent`, and turns every outcome into plain data. A method
that raises would leave the other ranks' replies in vLLM's queue, so none does.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from vllm_delta_sync import config as settings
from vllm_delta_sync import kernels
from vllm_delta_sync.errors import DeltaSyncError, UnsupportedEngine
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.serving import cores, engine, platform_cpu
from vllm_delta_sync.serving.agent import Agent
from vllm_delta_sync.serving.controller import LEADER
from vllm_delta_sync.serving.dump import dump
from vllm_delta_sync.serving.rank import Rank

logger = logging.getLogger("vllm.delta_sync")

_said = platform_cpu.keep_weights_patchable()
if _said:
    logger.warning("delta-sync: %s", _said)

_Method = TypeVar("_Method", bound=Callable[..., dict[str, Any]])


def _told(method: _Method) -> _Method:
    """Return {"ok": True, …} or {"ok": False, "cause", "text"}; never raise."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"ok": True, **method(*args, **kwargs)}
        except DeltaSyncError as error:
            return {"ok": False, "cause": error.cause, "text": str(error)}
        except Exception as error:
            logger.exception("delta-sync: %s failed", method.__name__)
            return {"ok": False, "cause": "internal", "text": f"{type(error).__name__}: {error}"}

    return cast(_Method, wrapped)


class WorkerExtension:
    """Mixed into vLLM's worker class; all names begin with `delta_sync_` so as not to meet the worker's own."""

    _delta_sync_rank: Rank
    _delta_sync_agent: Agent

    def __new__(cls, *args: Any, **kwargs: Any) -> WorkerExtension:
        """Stop a server that is set up wrongly before it loads a model.

        Raises:
            ConfigError: a setting is wrong, or the engine cannot carry commits.
        """
        worker = super().__new__(cls)
        vllm_config = kwargs.get("vllm_config") or args[0]
        config = settings.load(vllm_config.additional_config)
        engine.require_installed(vllm_config, os.environ)
        rank = int(kwargs.get("rank", 0))
        worker._delta_sync_config = config
        worker._delta_sync_rank = Rank(
            rank,
            lambda device: kernels.select(config.kernel, device, threads=config.threads),
            config.max_staged_bytes,
            NodeCache(folder, config.cache_bytes) if (folder := config.cache_folder()) else None,
            config.device_staged_bytes,
        )
        return worker

    _delta_sync_config: settings.DeltaSyncConfig

    # --- called by the engine ----------------------------------------------------------------------------------------
    @_told
    def delta_sync_reserve(self) -> dict[str, Any]:
        """Set device memory aside, before vLLM sizes its KV cache by what is left; tells how many bytes."""
        return {"bytes": self._delta_sync_rank.set_aside(self._delta_sync_model()).nbytes}

    @_told
    def delta_sync_cores(self) -> dict[str, Any]:
        """Tell which CPU cores this rank computes on."""
        return {"cores": cores.of_this_process()}

    @_told
    def delta_sync_open(self, address: str, authkey: str, spare: frozenset[int]) -> dict[str, Any]:
        """Connect to the engine's controller and start the background threads, on the `spare` cores if any."""
        self._delta_sync_agent = Agent(
            self._delta_sync_rank, self._delta_sync_config, address, bytes.fromhex(authkey), spare
        )
        self._delta_sync_agent.start()
        return {"rank": self._delta_sync_rank.number}

    @_told
    def delta_sync_trace(self) -> dict[str, Any]:
        """Trace the model's loader; returns the rank's layout, and on the leader the tensors of the base."""
        rank = self._delta_sync_rank
        layout = rank.trace(self._delta_sync_model())
        assert rank.base is not None
        backend = {"kernel": rank.backend.name, "kernel_reason": rank.backend.reason}
        specs = rank.base.tensors if rank.number == LEADER else ()
        return {"rank": rank.number, "layout": layout, "specs": specs, **backend}

    @_told
    def delta_sync_commit(self, version: int) -> dict[str, Any]:
        """Write what is staged, the step to `version`, into live memory."""
        return {"elements": self._delta_sync_rank.commit(version)}

    @_told
    def delta_sync_rollback(self, version: int) -> dict[str, Any]:
        """Undo `version` if this rank committed it."""
        self._delta_sync_rank.rollback(version)
        return {}

    # --- for operators -----------------------------------------------------------------------------------------------
    @_told
    def delta_sync_status(self) -> dict[str, Any]:
        """Which version this rank holds, and which is staged."""
        rank = self._delta_sync_rank
        return {"rank": rank.number, "version": rank.version, "staged": rank.staged_version}

    @_told
    def delta_sync_audit(self) -> dict[str, Any]:
        """Ask for a full pass over the live weights of all ranks; the outcome appears in the engine's status."""
        if self._delta_sync_rank.number == LEADER:
            self._delta_sync_agent.want_audit()
        return {"requested": self._delta_sync_rank.version is not None}

    @_told
    def delta_sync_dump(self, directory: str) -> dict[str, Any]:
        """Write this rank's live weights, box by box, into `directory` (see `dump`)."""
        return {"path": str(dump(self._delta_sync_rank, directory))}

    def _delta_sync_model(self) -> torch.nn.Module:
        runner = getattr(self, "model_runner", None)
        model = getattr(runner, "model", None)
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedEngine(f"{type(self).__name__} has no model_runner.model; this vLLM is not supported")
        return model
