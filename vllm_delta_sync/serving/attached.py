"""What an engine core carries when it follows a log: controller, loop, gate, and the engine-side work of each.

Everything in `EngineWork` runs on the engine thread, between two steps, and only when there is something to do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from vllm_delta_sync import config as settings
from vllm_delta_sync.errors import DeltaSyncError, NotCaughtUp, Poisoned, UnsupportedEngine
from vllm_delta_sync.serving import cores
from vllm_delta_sync.serving.actions import Committed, EngineFailed, Event, Traced
from vllm_delta_sync.serving.controller import Controller
from vllm_delta_sync.serving.engine import PLUGIN
from vllm_delta_sync.serving.loop import Gate, Loop
from vllm_delta_sync.serving.state import Phase
from vllm_delta_sync.serving.status import StatusFile, status_path

logger = logging.getLogger("vllm.delta_sync")

CONNECT_TIMEOUT_S = 30.0


class EngineWork:
    """Trace, commit and stop, on the engine thread.

    Args:
        core: vLLM's EngineCore.
        config: the caches' policy and the commit's time-out.
    """

    def __init__(self, core: Any, config: settings.DeltaSyncConfig) -> None:
        self._core = core
        self._config = config
        self.kernel: dict[str, str] = {}
        self.salt: str | None = None  # names the weights that serve; None until they are known
        self._highest = ("", -1)  # run and the highest version that requests were ever named after in it
        self._again = 0
        self._labels: deque[tuple[int, str]] = deque()  # (batches in flight that still belong to the one before, label)
        self._encoder_stale = False

    def reserve(self) -> None:
        """Have the ranks set device memory aside.

        Raises:
            ConfigError: one has not as much left.
        """
        most = max(result["bytes"] for result in self._call("delta_sync_reserve"))
        if most:
            logger.info("delta-sync: %.0f MiB of each device are set aside for updates", most / (1 << 20))

    def open(self, address: str, authkey: bytes) -> int:
        """Connect the ranks; returns how many there are."""
        busy = frozenset().union(*(result["cores"] for result in self._call("delta_sync_cores")))
        return len(self._call("delta_sync_open", (address, authkey.hex(), cores.of_this_process() - busy)))

    def trace(self, attempt: int) -> Event:
        try:
            results = sorted(self._call("delta_sync_trace"), key=lambda result: result["rank"])
        except DeltaSyncError as error:
            return EngineFailed(attempt, error.cause, str(error))
        self.kernel = {name: results[0][name] for name in ("kernel", "kernel_reason")}
        logger.info("delta-sync: kernel %s (%s)", *self.kernel.values())
        return Traced(attempt, tuple(results[0]["specs"]), tuple(result["layout"] for result in results))

    def commit(self, run: str, version: int) -> Event:
        """Every rank or none. Queued behind the batches in flight, and before the next."""
        begin = time.perf_counter()
        before = self.salt
        # From here on, so that no request that comes in meanwhile is given blocks of the weights that go.
        self.salt = self._fresh_salt(run, version)
        # Batches in flight come first, and may take as long as they like.
        timeout = None if getattr(self._core, "batch_queue", None) else self._config.commit_timeout_s
        try:
            self._call("delta_sync_commit", (version,), timeout)
        except Poisoned as error:
            return Committed(version, time.perf_counter() - begin, (error.cause, str(error)), trusted=False)
        except DeltaSyncError as error:
            self.salt = before
            trusted = self._roll_back(version)
            return Committed(version, time.perf_counter() - begin, (error.cause, str(error)), trusted)
        self._set_label(str(version))
        self._unless_vllm_fails(self._treat_caches)
        return Committed(version, time.perf_counter() - begin)

    def adopt(self, run: str, version: int) -> None:
        """Label outputs with the version that the weights served are known to be."""
        self.salt = self._fresh_salt(run, version)
        self._set_label(str(version))

    def _fresh_salt(self, run: str, version: int) -> str:
        """A name for weights that no request carried before.

        Not after a commit that failed, for its name stood for weights that never served; and not when a version comes
        back (a pin, its end, an older run), for a request that ran through a commit left blocks computed by both.
        """
        again = version <= self._highest[1] if run == self._highest[0] else self._highest[0] != ""
        self._again += again
        self._highest = (run, max(version, self._highest[1]) if run == self._highest[0] else version)
        return f"{run}:{version}" + (f"~{self._again}" if self._again else "")

    def stop(self, text: str) -> NoReturn:
        """End the engine, and with it the server."""
        raise DeltaSyncError(f"delta-sync stops the server (on_error: stop): {text}")

    def after_batch(self) -> None:
        """One batch's outputs got their weight version; the batches in flight at a commit keep the old one."""
        if self._labels:
            left, label = self._labels[0]
            if left > 1:
                self._labels[0] = (left - 1, label)
            else:
                self._labels.popleft()
                self._core.set_weight_version(label)
        if self._encoder_stale:
            self._unless_vllm_fails(self._reset_encoder_cache)

    def _set_label(self, label: str) -> None:
        in_flight = len(getattr(self._core, "batch_queue", None) or ())
        waiting = sum(left for left, _ in self._labels)
        if in_flight > waiting:
            self._labels.append((in_flight - waiting, label))
        elif self._labels:
            self._labels[-1] = (self._labels[-1][0], label)
        else:
            self._core.set_weight_version(label)

    def _unless_vllm_fails(self, treat: Callable[[], None]) -> None:
        try:
            treat()
        except Exception:  # the weights are committed, and the server must not end for it
            logger.exception("delta-sync: %s is served, but what vLLM caches of requests stays", self.salt)

    def _treat_caches(self) -> None:
        if self._config.kv_cache == "keep" or not hasattr(self._core, "scheduler"):
            return  # the scheduler is absent while the engine is still being built
        if self._config.kv_cache == "recompute":
            try:
                self._core.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError as error:  # blocks that wait for a remote transfer cannot be taken back
                logger.error("delta-sync: running requests keep keys and values of the version before: %s", error)
        if self._core.vllm_config.model_config.is_multimodal_model:
            self._reset_encoder_cache()

    def _reset_encoder_cache(self) -> None:
        """At once, or as soon as no request needs what it holds."""
        self._encoder_stale = self._core.scheduler.has_unfinished_requests()
        if not self._encoder_stale:
            self._core.reset_encoder_cache()

    def _roll_back(self, version: int) -> bool:
        try:
            self._call("delta_sync_rollback", (version,), self._config.commit_timeout_s)
        except DeltaSyncError as error:
            logger.error("delta-sync: roll-back of version %d failed: %s", version, error)
            return False
        return True

    def _call(self, method: str, args: tuple[Any, ...] = (), timeout: float | None = None) -> list[dict[str, Any]]:
        """One RPC to every rank; raises what the first failing rank says, once all have answered, or a poisoned one."""
        try:
            results: list[dict[str, Any]] = self._core.collective_rpc(method, timeout, args)
        except Exception as error:
            # The missing reply stays in vLLM's queue and would be taken for another call's: no further RPC can be
            # trusted.
            raise Poisoned(f"{method} did not come back from every rank: {type(error).__name__}: {error}") from error
        failed = [(number, result) for number, result in enumerate(results) if not result["ok"]]
        if failed:
            # No roll-back mends a rank that is half written, whatever the others say.
            number, result = min(failed, key=lambda one: one[1]["cause"] != Poisoned.cause)
            raise _as_error(result["cause"], f"rank {number}: {result['text']}")
        return results


class Attached:
    """The parts, wired to one engine core.

    Args:
        core: an EngineCore whose model is loaded.
    """

    def __init__(self, core: Any) -> None:
        vllm_config = core.vllm_config
        self.config = settings.load(vllm_config.additional_config)
        _require_queue(core.model_executor)
        self.in_process = not hasattr(core, "input_queue")
        self.ops = EngineWork(core, self.config)
        parallel = vllm_config.parallel_config
        path = status_path(vllm_config.instance_id, int(getattr(parallel, "data_parallel_index", 0) or 0))
        self._core = core
        self._controller = Controller(
            parallel.world_size,
            ignore_unmapped=self.config.unmapped == "ignore",
            stop_on_error=self.config.on_error == "stop",
            audit_every=self.config.audit_every,
        )
        self.loop = Loop(self._controller, StatusFile(path, self._facts))
        self.gate = Gate(self.ops, self._wake, self.loop.report)

    def start(self) -> None:
        """Connect the ranks and, under `start: catch_up`, bring them to the tip before anything is served.

        Raises:
            DeltaSyncError: the tip cannot be reached; says why.
        """
        ranks = self.ops.open(self.loop.hub.address, self.loop.hub.authkey)
        self.loop.hub.wait_for(ranks, CONNECT_TIMEOUT_S)
        self.loop.start(self.gate)
        if self.config.start == "catch_up":
            self._catch_up()

    def salt(self, request: Any) -> None:
        """Make the version part of a new request's block hashes, so that no block computed before serves it.

        vLLM's own reset of the prefix cache refuses while requests run, and would starve under constant traffic.
        """
        if self.config.kv_cache != "keep" and self.ops.salt is not None:
            request.cache_salt = f"{request.cache_salt or ''}|delta-sync:{self.ops.salt}"

    def stop(self) -> None:
        self.loop.stop()

    def _facts(self) -> dict[str, Any]:
        return {**self.ops.kernel, "engine_thread_seconds": self.gate.seconds}

    def _wake(self) -> None:
        if not self.in_process:
            from vllm.v1.engine import EngineCoreRequestType

            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, PLUGIN))

    def _catch_up(self) -> None:
        deadline = time.monotonic() + self.config.catch_up_timeout_s
        logger.info("delta-sync: catching up with %s before serving", self.config.store.uri)
        while not self.loop.settled.is_set():
            if time.monotonic() > deadline:
                raise NotCaughtUp(
                    f"could not catch up with {self.config.store.uri} within catch_up_timeout_s = "
                    f"{self.config.catch_up_timeout_s:.0f} s "
                    f"({self.loop.last_error or 'no error, just slow'}); raise it, or set `start: "
                    "serve_base` to serve the base meanwhile"
                )
            if self.gate.arrived.wait(0.05):
                self.gate.run_pending()
        status = self._controller.status
        if status.phase in (Phase.HALTED, Phase.POISONED):
            raise _as_error(status.last_cause, status.last_error or status.phase.value)
        if status.served is None:
            logger.warning("delta-sync: nothing is published at %s yet; serving the checkpoint", self.config.store.uri)


def _require_queue(executor: Any) -> None:
    """Raise UnsupportedEngine unless all calls go to the ranks through one queue, in order, as a commit needs it."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    if isinstance(executor, ExecutorWithExternalLauncher) or not isinstance(
        executor, (MultiprocExecutor, UniProcExecutor)
    ):
        raise UnsupportedEngine(
            f"{type(executor).__name__} does not send all calls to the ranks through one queue, so a commit cannot be "
            "placed between two steps; use --distributed-executor-backend mp"
        )


def _as_error(cause: str | None, text: str) -> DeltaSyncError:
    """An error of the tree, from its label."""
    kinds = [DeltaSyncError]
    while kinds:
        kind = kinds.pop()
        if kind.cause == cause and kind.__init__ is DeltaSyncError.__init__:
            return kind(text)
        kinds += kind.__subclasses__()
    return DeltaSyncError(text)
