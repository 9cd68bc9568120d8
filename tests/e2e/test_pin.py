"""One server under load is taken back by a pin, forward by its end, and on to another run; no request is lost.

The tests run in order on the same engine, while the same requests go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Model, assert_bits, metric, serving, until, until_served
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.demo.load import Load
from vllm_delta_sync.demo.server import VllmServer
from vllm_delta_sync.log.export import export
from vllm_delta_sync.log.pinning import pin, unpin

pytestmark = pytest.mark.e2e

TIP, PINNED = 5, 2


class Run:
    """What the tests of this module share."""

    def __init__(self, server: VllmServer, base: Path, bucket: Path, load: Load) -> None:
        self.server, self.base, self.bucket, self.load = server, base, bucket, load
        self.model = Model(base)

    def publish(self, publisher: Publisher) -> int:
        self.model.step()
        publication = publisher.publish(self.model.state)
        publication.result(timeout=60)
        return publication.version


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("pin")
    bucket = folder / "bucket"
    with (
        serving(smollm2, bucket, folder / "serve.log") as server,
        Load(server.url, streams=2, result=folder / "traffic.json") as load,
    ):
        yield Run(server, smollm2, bucket, load)


def test_a_pin_takes_the_server_back_and_its_end_to_the_tip_byte_for_byte(run: Run, tmp_path: Path) -> None:
    with Publisher.open(f"file://{run.bucket}", base=run.base) as publisher:
        for _ in range(TIP):
            run.publish(publisher)
        until_served(run.server, TIP)
        log = DeltaLog.open(run.bucket)
        assert metric(run.server, "pinned_version") == -1
        pin(log, PINNED, run.base)
        until_served(run.server, PINNED)
        assert metric(run.server, "pinned_version") == PINNED and metric(run.server, "lag_versions") == 0
        assert_bits(run.server, log, run.base, PINNED, tmp_path)
        tip = run.publish(publisher)  # the trainer goes on meanwhile
        until(lambda: metric(run.server, "latest_version") == tip, "the new version to be seen")
        assert metric(run.server, "served_version") == PINNED
        unpin(log)
        until_served(run.server, tip)
        assert_bits(run.server, log, run.base, tip, tmp_path)
    assert metric(run.server, "hops_total", kind="fold") >= 1
    assert metric(run.server, "failures_total", cause="version_gap") == 0


def test_a_trainer_restarted_on_an_export_is_followed_on_without_a_restart_of_the_server(
    run: Run, tmp_path: Path
) -> None:
    served = int(metric(run.server, "served_version"))
    old = DeltaLog.open(run.bucket)
    exported = tmp_path / "export"
    export(old, served, exported, run.base)
    with Publisher.open(f"file://{run.bucket}", base=exported) as publisher:
        until(lambda: metric(run.server, "run_changes_total") == 1, "the new run to be seen")
        version = run.publish(publisher)
        until_served(run.server, version)
        assert_bits(run.server, DeltaLog.open(run.bucket), exported, version, tmp_path)
    assert old.run != DeltaLog.open(run.bucket).run
    assert metric(run.server, "failures_total", cause="base_mismatch") == 0


def test_no_request_was_lost(run: Run) -> None:
    traffic = run.load.stop()
    assert traffic.failures == () and traffic.finished >= 2  # one a stream
