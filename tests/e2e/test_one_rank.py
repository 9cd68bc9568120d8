"""One server, started before anything is published, through all that a bucket and a trainer can do to it.

The tests run in order on the same engine: each leaves it following.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import Model, assert_bits, metric, serving, until, until_served
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.demo.load import Load
from vllm_delta_sync.demo.server import VllmServer

pytestmark = pytest.mark.e2e

PROMPT = "The tide table of the harbour says that the water will rise until noon, and that the boats"


class Run:
    """What the tests of this module share."""

    def __init__(self, server: VllmServer, base: Path, bucket: Path) -> None:
        self.server, self.base, self.bucket = server, base, bucket
        self.model = Model(base)
        self.publisher: Publisher | None = None

    def publish(self) -> int:
        """One step; returns its version once it is in the log."""
        assert self.publisher is not None
        self.model.step()
        publication = self.publisher.publish(self.model.state)
        publication.result(timeout=60)
        return publication.version

    def cached_tokens(self) -> int:
        """Prompt tokens of PROMPT that the prefix cache gave."""
        body = {"model": "demo", "prompt": PROMPT * 16, "max_tokens": 1, "temperature": 0}
        usage = self.server.post("/v1/completions", body)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("one-rank")
    with serving(smollm2, folder / "bucket", folder / "serve.log") as server:
        shared = Run(server, smollm2, folder / "bucket")
        yield shared
        if shared.publisher is not None:
            shared.publisher.close()


def test_a_server_starts_before_anything_is_published_and_serves_its_checkpoint(run: Run) -> None:
    assert metric(run.server, "served_version") == -1
    assert metric(run.server, "phase", phase="waiting") == 1
    assert run.server.complete(PROMPT, 4)


def test_an_idle_server_takes_up_a_run_that_begins_and_serves_it_bit_for_bit(run: Run, tmp_path: Path) -> None:
    run.publisher = Publisher.open(f"file://{run.bucket}", base=run.base)
    until_served(run.server, 0)
    for version in (1, 2):
        assert run.publish() == version
        until_served(run.server, version)
    assert_bits(run.server, DeltaLog.open(run.bucket), run.base, 2, tmp_path)
    assert metric(run.server, "commits_total") == 2
    assert metric(run.server, "changed_elements_total") > 100_000
    assert metric(run.server, "fetched_bytes_total") > 0
    assert metric(run.server, "commit_seconds_count") == 2
    assert metric(run.server, "lag_versions") == 0
    assert "native" in run.server.get("/metrics").partition("vllm:delta_sync_kernel_info{")[2][:200]


def test_a_busy_server_takes_updates_between_steps_and_loses_no_request(run: Run, tmp_path: Path) -> None:
    with Load(run.server.url, streams=3, result=tmp_path / "traffic.json") as load:
        time.sleep(3)
        for _ in range(3):
            until_served(run.server, run.publish())
        traffic = load.stop()
    assert traffic.failures == () and traffic.finished >= 3
    assert_bits(run.server, DeltaLog.open(run.bucket), run.base, 5, tmp_path)


def test_an_audit_on_demand_finds_every_tensor_right(run: Run) -> None:
    before = metric(run.server, "audits_total", outcome="right")
    assert all(answer["ok"] for answer in run.server.ask_ranks("delta_sync_audit"))
    until(lambda: metric(run.server, "audits_total", outcome="right") == before + 1, "the audit")
    assert metric(run.server, "audits_total", outcome="wrong") == 0


def test_no_block_computed_before_a_commit_serves_a_request_that_comes_after(run: Run, tmp_path: Path) -> None:
    run.cached_tokens()
    assert run.cached_tokens() > 0  # the cache works
    with Load(run.server.url, streams=1, result=tmp_path / "traffic.json"):  # vLLM's own reset would be refused
        time.sleep(1)
        until_served(run.server, run.publish())
        assert run.cached_tokens() == 0
        assert run.cached_tokens() > 0


def test_a_bucket_that_vanishes_costs_nothing_and_is_followed_again_when_it_is_back(run: Run, tmp_path: Path) -> None:
    served = metric(run.server, "served_version")
    failures = metric(run.server, "failures_total", cause="not_found")
    away = run.bucket.with_name("away")
    run.bucket.rename(away)
    until(lambda: metric(run.server, "failures_total", cause="not_found") > failures, "the failure to be counted")
    assert run.server.complete(PROMPT, 4)
    assert metric(run.server, "served_version") == served
    away.rename(run.bucket)
    version = run.publish()
    until_served(run.server, version)
    assert_bits(run.server, DeltaLog.open(run.bucket), run.base, version, tmp_path)


@pytest.mark.parametrize("damage", ["flipped byte", "truncated"])
def test_a_damaged_shard_is_named_nothing_is_lost_and_the_server_catches_up_when_it_is_whole(
    run: Run, tmp_path: Path, damage: str
) -> None:
    """The next version is prepared out of the server's sight, damaged, and shown."""
    served = metric(run.server, "served_version")
    failures = metric(run.server, "failures_total", cause="digest")
    hidden = run.bucket / "LATEST"
    latest = next(run.bucket.glob("*/LATEST"))
    before = latest.read_bytes()
    copy = tmp_path / "bucket"
    shutil.copytree(run.bucket, copy)
    run.model.step()
    with Publisher.open(f"file://{copy}", resume=True) as publisher:
        publication = publisher.publish(run.model.state)
        publication.result(timeout=60)
    good = {}
    for path in copy.rglob("*"):
        target = run.bucket / path.relative_to(copy)
        if path.is_file() and not target.exists():
            good[target] = path.read_bytes()
            bad = good[target]
            if target.suffix == ".safetensors":
                middle = len(bad) // 2
                bad = bad[:-1] if damage == "truncated" else bad[:middle] + bytes([bad[middle] ^ 1]) + bad[middle + 1 :]
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(bad)
    assert not hidden.exists()
    replacement = latest.with_name("LATEST.new")
    replacement.write_bytes(next(copy.glob("*/LATEST")).read_bytes())
    os.replace(replacement, latest)
    assert latest.read_bytes() != before
    until(lambda: metric(run.server, "failures_total", cause="digest") > failures, "the damage to be seen")
    assert metric(run.server, "served_version") == served
    assert run.server.complete(PROMPT, 4)
    for target, data in good.items():
        target.write_bytes(data)
    until_served(run.server, publication.version)
    assert_bits(run.server, DeltaLog.open(run.bucket), run.base, publication.version, tmp_path)
    assert run.publisher is not None
    run.publisher = Publisher.open(f"file://{run.bucket}", resume=True)


def test_the_engine_thread_spends_nothing_on_us_while_nothing_is_new(run: Run) -> None:
    """Less than a thousandth of the time, counted by the kernel for that thread, whoever asks for it."""
    (engine,) = (p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline()))
    seconds = 12.0

    def used() -> float:
        return sum(t.user_time + t.system_time for t in engine.threads() if t.id == engine.pid)

    before = used()
    time.sleep(seconds)
    assert used() - before <= seconds / 1000


def test_the_log_tells_what_happened_and_holds_no_stack_trace(run: Run) -> None:
    log = run.server.log.read_text()
    for said in ("packing of weights on CPU is off", "kernel native", "not_found", "digest", "serving version"):
        assert said in log, said
    assert "Traceback" not in log
