"""Two tensor-parallel ranks follow as one: all of them at a version, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.serving import Model, assert_bits, metric, serving, until, until_served
from vllm_delta_sync import DeltaLog, Publisher
from vllm_delta_sync.demo.load import Load

pytestmark = pytest.mark.e2e


def test_two_ranks_catch_up_before_serving_and_stay_bit_identical_under_load(twin: Path, tmp_path: Path) -> None:
    bucket, model = tmp_path / "bucket", Model(twin)
    with Publisher.open(f"file://{bucket}", base=twin) as publisher:
        for _ in range(2):
            model.step()
            publisher.publish(model.state).result(timeout=60)
        with serving(twin, bucket, tmp_path / "serve.log", tensor_parallel=2, audit_every=2) as server:
            assert "serving version 2" in server.log.read_text()  # before the first request
            assert_bits(server, DeltaLog.open(bucket), twin, 2, tmp_path)
            with Load(server.url, streams=2, result=tmp_path / "traffic.json") as load:
                for version in (3, 4):
                    model.step()
                    publisher.publish(model.state).result(timeout=60)
                    until_served(server, version)
                traffic = load.stop()
            assert traffic.failures == ()
            answers = server.ask_ranks("delta_sync_status")
            assert [(answer["rank"], answer["version"]) for answer in answers] == [(0, 4), (1, 4)]
            assert_bits(server, DeltaLog.open(bucket), twin, 4, tmp_path)
            until(lambda: metric(server, "audits_total", outcome="right") >= 2, "the audits every two versions")
            assert metric(server, "audits_total", outcome="wrong") == 0
