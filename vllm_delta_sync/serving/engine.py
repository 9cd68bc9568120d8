"""The hooks in vLLM's EngineCore: where a commit enters the engine's own queue, and nothing else.

Loaded by vLLM in every process as a general plugin (`install`); active only in an engine whose worker extension is
ours. What an active engine does is in `attached`; here stand the private names that it needs, each probed before use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.errors import UnsupportedEngine

if TYPE_CHECKING:
    from vllm_delta_sync.serving.attached import Attached

PLUGIN = "delta_sync"
EXTENSIONS = ("vllm_delta_sync.WorkerExtension", "vllm_delta_sync.serving.extension.WorkerExtension")
_ATTRIBUTE = "_delta_sync"
_CORE_METHODS = (
    "_initialize_kv_caches",
    "preprocess_add_request",
    "step",
    "step_with_batch_queue",
    "shutdown",
    "set_weight_version",
)

_installed = False
_problem: str | None = None


def install() -> None:
    """Entry point `vllm.general_plugins`: hook EngineCore, once per process.

    A vLLM that lacks a hook keeps working as if this package were absent, until somebody asks for the extension.
    """
    global _installed, _problem
    if _installed:
        return
    _installed = True
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    missing = [f"EngineCore.{name}" for name in _CORE_METHODS if not hasattr(EngineCore, name)]
    if not hasattr(EngineCoreProc, "_handle_client_request"):
        missing.append("EngineCoreProc._handle_client_request")
    if not hasattr(EngineCoreRequestType, "WAKEUP"):
        missing.append("EngineCoreRequestType.WAKEUP")
    if missing:
        _problem = f"this vLLM lacks {', '.join(missing)}; the versions supported are 0.29 to 0.33"
        return
    _wrap(EngineCore, "_initialize_kv_caches", _attach_around)
    _wrap(EngineCore, "preprocess_add_request", _salt_before)
    _wrap(EngineCore, "step", _run_pending_before)
    _wrap(EngineCore, "step_with_batch_queue", _run_pending_before)
    _wrap(EngineCore, "shutdown", _detach_before)
    _wrap(EngineCoreProc, "_handle_client_request", _take_wakeup)
    if hasattr(EngineCore, "_attach_weight_version"):
        _wrap(EngineCore, "_attach_weight_version", _label_after)


def require_installed(vllm_config: Any, environ: Mapping[str, str]) -> None:
    """In a worker, before it loads a model: can the engine of this server carry commits?

    Raises:
        UnsupportedEngine: says what stands in the way and what to change.
    """
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        raise UnsupportedEngine(
            f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN!r}, without which updates cannot be committed between steps; "
            f"add it: VLLM_PLUGINS={','.join(filter(None, [allowed, PLUGIN]))}"
        )
    if not _installed:
        raise UnsupportedEngine(
            "vLLM did not load the plugin 'delta_sync'; install vllm-delta-sync into the environment that runs vLLM "
            "(an import path alone is not enough: entry points come with the installed distribution)"
        )
    if _problem is not None:
        raise UnsupportedEngine(_problem)
    if not is_ours(vllm_config):
        raise UnsupportedEngine(
            f"--worker-extension-cls {vllm_config.parallel_config.worker_extension_cls} derives from WorkerExtension, "
            f"and the engine side knows only {EXTENSIONS[0]} itself; name that one"
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise UnsupportedEngine(
            "--enable-sleep-mode takes the weights away while the engine sleeps, and updates would be written into "
            "memory that is not there; serve without it"
        )
    offloading = getattr(getattr(vllm_config, "offload_config", None), "prefetch", None)
    if getattr(offloading, "offload_group_size", 0):
        raise UnsupportedEngine(
            "--offload-group-size keeps weights in host memory and fetches them for each step into buffers that layers "
            "share; updates would be written into those and be lost: serve without it"
        )
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 and getattr(parallel, "dcp_q_replicate", False):
        raise UnsupportedEngine(
            "decode context parallel with replicated queries keeps a copy of weights that updates would not reach, and "
            "would serve those of two versions; serve with --no-dcp-q-replicate or --decode-context-parallel-size 1"
        )
    experts = parallel.enable_expert_parallel or getattr(vllm_config.model_config, "is_moe", False)
    if parallel.data_parallel_size > 1 and experts:
        raise UnsupportedEngine(
            "data parallel with expert parallel runs one forward over all replicas, which commits would "
            "have to enter together; "
            "that is not supported: serve without --enable-expert-parallel or with --data-parallel-size 1"
        )


def is_ours(vllm_config: Any) -> bool:
    """Whether this engine's workers carry our extension."""
    return vllm_config.parallel_config.worker_extension_cls in EXTENSIONS


def attached(core: Any) -> Attached | None:
    """What is attached to this engine core, if anything."""
    ours: Attached | None = core.__dict__.get(_ATTRIBUTE)
    return ours


def _wrap(cls: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(cls, name)
    setattr(cls, name, functools.wraps(original)(make(original)))


def _attach_around(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kv_caches(core: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(core.vllm_config):
            return original(core, *args, **kwargs)
        from vllm_delta_sync.serving.attached import Attached

        ours = Attached(core)
        try:
            ours.ops.reserve()  # the model is loaded, and what is left will be the KV cache's
            result = original(core, *args, **kwargs)
            core.__dict__[_ATTRIBUTE] = ours
            ours.start()
        except BaseException:
            ours.stop()
            raise
        return result

    return initialize_kv_caches


def _salt_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess_add_request(core: Any, request: Any) -> Any:
        if (ours := attached(core)) is not None:
            if ours.in_process:  # a commit that waits comes before whatever is asked for after it
                ours.gate.run_pending()
            ours.salt(request)
        return original(core, request)

    return preprocess_add_request


def _run_pending_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(core: Any) -> Any:
        if (ours := attached(core)) is not None and ours.in_process:
            ours.gate.run_pending()
        return original(core)

    return step


def _detach_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(core: Any) -> Any:
        try:
            if (ours := attached(core)) is not None:
                ours.stop()
        finally:
            original(core)

    return shutdown


def _take_wakeup(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.engine import EngineCoreRequestType

    def handle_client_request(core: Any, request_type: Any, request: Any) -> Any:
        if request_type is EngineCoreRequestType.WAKEUP and request == PLUGIN:
            ours = attached(core)
            assert ours is not None
            return ours.gate.run_pending()
        return original(core, request_type, request)

    return handle_client_request


def _label_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def attach_weight_version(core: Any, outputs: Any) -> Any:
        result = original(core, outputs)
        if (ours := attached(core)) is not None:
            ours.ops.after_batch()
        return result

    return attach_weight_version
