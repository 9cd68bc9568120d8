"""Operating a log from the command line: exit codes, tables, one JSON object."""

from __future__ import annotations

import json
import re
import subprocess

import tiny_folds
import tiny_log

from tests.unit.cli.command import command_line, run, run_json
from vllm_delta_sync.log import LogWriter
from vllm_delta_sync.wire.manifest import BaseRef


def test_log_shows_the_newest_versions_first(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    tiny_folds.add_anchor(tiny, 2)
    found = run_json("log", tiny.bucket, "--limit", 2)
    assert (found["run"], found["tip"], found["pin"], found["oldest"]) == (tiny.log.run, 3, None, 0)
    assert [(row["version"], row["step"]) for row in found["versions"]] == [(3, 30), (2, 20)]
    newest, folded = found["versions"]
    totals = tiny.log.tip().totals
    assert (newest["changed"], newest["bytes"]) == (totals.changed, totals.bytes)
    assert newest["changed_percent"] == round(100 * totals.changed / totals.elements, 4)
    assert abs(sum(newest["codecs"].values()) - 1) < 1e-3
    assert set(newest["codecs"]) <= {"gap", "gap-abs", "dense"}
    assert 0 <= newest["age_s"] < 3600
    assert (newest["anchor"], newest["folds_from"]) == (False, [])
    assert (folded["anchor"], folded["folds_from"]) == (True, [0])
    everything = run_json("log", tiny.bucket, "--limit", 0)["versions"]
    assert [row["version"] for row in everything] == [3, 2, 1, 0]
    text = run("log", tiny.bucket)
    assert (text.returncode, text.stderr) == (0, "")
    assert f"run {tiny.log.run}: version 3; 1 folds, 1 anchors" in text.stdout
    assert "anchor, fold from 0" in text.stdout


def test_log_ends_where_the_deltas_that_were_kept_do(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    run_json("gc", tiny.bucket, "--keep-versions", 1, "--delete")
    assert [row["version"] for row in run_json("log", tiny.bucket, "--limit", 0)["versions"]] == [3, 0]
    assert run_json("inspect", tiny.bucket)["versions"]


def test_runs_shows_every_run_and_which_is_current(tiny: tiny_log.TinyLog) -> None:
    old, named = tiny.log.run, tiny.log.base().base
    assert named is not None
    LogWriter.create(str(tiny.bucket), tiny_log.lanes_of(tiny.models[-1]), base=BaseRef(model="next"))
    found = run_json("runs", tiny.bucket)["runs"]
    assert [(row["run"], row["current"], row["version"], row["base"]) for row in found] == [
        (tiny.log.run, True, 0, "next"),
        (old, False, 3, named.model),
    ]
    assert run_json("log", tiny.bucket, "--run", old)["tip"] == 3
    tiny.bucket.joinpath(old, "LATEST").write_bytes(b"{}")
    rows = {row["run"]: row for row in run_json("runs", tiny.bucket)["runs"]}
    assert rows[old]["fault"].startswith("malformed: ")
    assert rows[tiny.log.run]["fault"] is None
    text = run("runs", tiny.bucket)
    assert text.returncode == 0
    assert old in text.stdout


def test_pin_and_unpin(tiny: tiny_log.TinyLog) -> None:
    found = run_json("pin", tiny.bucket, "--version", 1, "--base", tiny.base)
    assert (found["pin"], found["tip"], found["folds_from"]) == (1, 3, [3, 2])
    assert tiny.log.latest().pin == 1
    assert "pinned to 1" in run("log", tiny.bucket).stdout
    assert run_json("unpin", tiny.bucket) == {"run": tiny.log.run, "pin": None, "tip": 3}
    assert tiny.log.latest().pin is None
    refused = run("pin", tiny.bucket, "--version", 9)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "there is no version 9" in refused.stderr


def test_gc_deletes_only_when_told(tiny: tiny_log.TinyLog) -> None:
    tiny_folds.add_fold(tiny, 0, 2)
    keys = list(tiny.log.store.list())
    text = run("gc", tiny.bucket, "--keep-versions", 1)
    assert text.returncode == 0
    assert "would go (delete them with --delete), deltas now begin after version 2" in text.stdout.replace("\n", " ")
    assert re.search(r"versions +│ 1–2 +│ the deltas that are kept begin after version 2 +│ yes +│ +3", text.stdout)
    found = run_json("gc", tiny.bucket, "--keep-versions", 1)
    going = {row["key"] for row in found["objects"] if row["goes"]}
    assert (found["oldest"], found["deleted"], list(tiny.log.store.list())) == (2, 0, keys)
    done = run_json("gc", tiny.bucket, "--keep-versions", 1, "--delete")
    assert done["deleted"] == len(going)
    assert not going & set(tiny.log.store.list())
    assert run("verify", tiny.bucket).returncode == 0


def test_verify_repairs_latest_only_when_told(tiny: tiny_log.TinyLog) -> None:
    tiny.object("LATEST").write_bytes(b"{}")
    assert run("verify", tiny.bucket).returncode == 1
    found = run_json("verify", tiny.bucket, "--repair-latest")
    assert (found["ok"], found["latest"]) == (True, {"version": 3, "changed": True})
    text = run("verify", tiny.bucket, "--repair-latest")
    assert "LATEST already named version 3; 4 of 4 manifests" in text.stdout
    assert run("verify", tiny.bucket, "--to", "x").returncode == 2


def test_watch_prints_versions_as_they_come_and_outlives_faults_and_runs(tiny: tiny_log.TinyLog) -> None:
    command = command_line("watch", tiny.bucket, "--interval", "0.1", "--until", "5", "--json")
    with subprocess.Popen(
        [*command, "--from-base"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        for version in (1, 2, 3):
            row = json.loads(watching.stdout.readline())
            assert (row["kind"], row["version"], row["step"]) == ("delta", version, 10 * version)
        latest = tiny.object("LATEST").read_bytes()
        tiny.object("LATEST").write_bytes(b"{}")
        assert watching.stderr.readline().startswith("malformed: ")
        tiny.object("LATEST").write_bytes(latest)
        tiny.publish(tiny_log.changed_model(tiny.models[-1], 4))
        assert json.loads(watching.stdout.readline())["version"] == 4
        new = tiny_log.TinyLog(
            tiny.bucket,
            tiny.base,
            LogWriter.create(str(tiny.bucket), tiny_log.lanes_of(tiny.models[-1]), base=BaseRef(model="next")),
            tiny.models[-1:],
        )
        while "has taken over from" not in (line := watching.stderr.readline()):
            assert line.startswith("malformed: ")
        assert line.startswith(f"run {new.log.run} ")
        for version in range(1, 6):
            new.publish(tiny_log.changed_model(new.models[-1], version))
            row = json.loads(watching.stdout.readline())
            assert (row["run"], row["version"]) == (new.log.run, version)
        assert watching.wait(30) == 0
