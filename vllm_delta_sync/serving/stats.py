"""The metrics on the server's own /metrics, `vllm:delta_sync_*`: a stat logger that vLLM loads in the API process.

Reads the engine's status file; never asks the engine anything. With several API servers one of them counts, since
vLLM adds up counters and histograms over them.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_delta_sync.serving.engine import is_ours
from vllm_delta_sync.serving.state import Phase
from vllm_delta_sync.serving.status import status_path

READ_INTERVAL_S = 0.25
_LABELS = ["model_name", "engine"]
_COMMIT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_STAGE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class _Series:
    """The collectors, made once per process; every engine has its own label values."""

    def __init__(self) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"vllm:delta_sync_{name}", text, [*_LABELS, *labels], multiprocess_mode="mostrecent")

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"vllm:delta_sync_{name}", text, [*_LABELS, *labels])

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:delta_sync_{name}", text, _LABELS, buckets=buckets)

        self.served = gauge("served_version", "Version of the weights being served; -1 before any is known.")
        self.latest = gauge("latest_version", "Newest version seen in the bucket; -1 before any is known.")
        self.pinned = gauge("pinned_version", "Version that followers are pinned to; -1 while there is no pin.")
        self.lag = gauge("lag_versions", "Versions between the one served and the latest or pinned; -1 if unknown.")
        self.age = gauge("seconds_since_commit", "Seconds since the last commit; NaN before the first.")
        self.phase = gauge("phase", "1 for the phase the engine is in.", ("phase",))
        self.kernel = gauge("kernel_info", "1 for the kernel backend that commits.", ("kernel", "reason"))
        self.commit = histogram("commit_seconds", "Pause of the engine for one commit.", _COMMIT_BUCKETS)
        self.stage = histogram("stage_seconds", "Decoding and mapping one version, slowest rank.", _STAGE_BUCKETS)
        self.fetch = histogram("fetch_seconds", "Fetching and verifying one version, slowest rank.", _STAGE_BUCKETS)
        self.fetched = counter("fetched_bytes", "Bytes fetched from the bucket, all ranks.")
        self.cached = counter("cached_bytes", "Bytes taken from the node's cache, all ranks.")
        self.changed = counter("changed_elements", "Elements changed by the versions committed.")
        self.commits = counter("commits", "Steps committed: deltas, folds and anchors.")
        self.hops = counter("hops", "Steps committed, by what they were made of.", ("kind",))
        self.run_changes = counter("run_changes", "Times that the bucket went on to another run.")
        self.failures = counter("failures", "Failures by cause.", ("cause",))
        self.audits = counter("audits", "Full passes over the live weights that ended.", ("outcome",))


_series: _Series | None = None


class DeltaSyncStatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not always installed where this is checked
    """Entry point `vllm.stat_logger_plugins`: one per engine; silent where the extension is not ours.

    Args:
        vllm_config: the server's.
        engine_index: which engine of a data-parallel server.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        counting = getattr(vllm_config.parallel_config, "_api_process_rank", 0) <= 0
        self._config = vllm_config if is_ours(vllm_config) and counting else None
        self._engine_index = engine_index

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing here depends on the engine's iterations."""

    def log_engine_initialized(self) -> None:
        """Begin to read. Not before: vLLM's own logger, made after this one, drops every `vllm:` series that exists."""
        global _series
        if self._config is not None:
            _series = _series or _Series()
            reader = _Reader(_series, self._config, self._engine_index)
            threading.Thread(target=reader.run, name="delta-sync-metrics", daemon=True).start()
            self._config = None


class _Reader:
    """Follows one engine's status file and moves the series along."""

    def __init__(self, series: _Series, vllm_config: Any, engine_index: int) -> None:
        self._series = series
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._path = status_path(vllm_config.instance_id, engine_index)
        self._sequence = -1
        self._committed = 0
        self._run_changes = 0
        self._failures: dict[str, int] = {}
        self._audit = 0
        self._committed_at: float | None = None

    def run(self) -> None:
        while True:
            body = _read(self._path)
            if body is not None and body["sequence"] != self._sequence:
                self._sequence = body["sequence"]
                self._take(body)
            age = float("nan") if self._committed_at is None else time.time() - self._committed_at
            self._series.age.labels(*self._labels).set(age)
            time.sleep(READ_INTERVAL_S)

    def _take(self, body: dict[str, Any]) -> None:
        series, labels = self._series, self._labels
        for gauge, name in (
            (series.served, "served"), (series.latest, "latest"), (series.pinned, "pin"), (series.lag, "lag"),
        ):  # fmt: skip
            gauge.labels(*labels).set(-1 if body[name] is None else body[name])
        series.run_changes.labels(*labels).inc(body["run_changes"] - self._run_changes)
        self._run_changes = body["run_changes"]
        for phase in Phase:
            series.phase.labels(*labels, phase.value).set(float(phase.value == body["phase"]))
        if "kernel" in body:
            series.kernel.labels(*labels, body["kernel"], body["kernel_reason"]).set(1)
        for record in (
            body["commits"][-(body["committed"] - self._committed) :] if body["committed"] > self._committed else ()
        ):
            self._take_commit(record)
        self._committed = body["committed"]
        for cause, count in body["failures"].items():
            series.failures.labels(*labels, cause).inc(count - self._failures.get(cause, 0))
        self._failures = body["failures"]
        if body["audit"] is not None and body["audit"]["number"] > self._audit:
            self._audit = body["audit"]["number"]
            series.audits.labels(*labels, "wrong" if body["audit"]["wrong"] else "right").inc()

    def _take_commit(self, record: dict[str, Any]) -> None:
        series, labels = self._series, self._labels
        series.commit.labels(*labels).observe(record["commit_seconds"])
        series.stage.labels(*labels).observe(record["stage_seconds"])
        series.fetch.labels(*labels).observe(record["fetch_seconds"])
        series.fetched.labels(*labels).inc(record["fetched_bytes"])
        series.cached.labels(*labels).inc(record["cached_bytes"])
        series.changed.labels(*labels).inc(record["changed"])
        series.commits.labels(*labels).inc()
        series.hops.labels(*labels, record["hop"]).inc()
        self._committed_at = record["at"]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):  # not written yet, or the engine has left
        return None
    return body
