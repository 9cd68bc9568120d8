"""The command line as a user runs it: real processes, exit codes, one JSON object, no tracebacks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_log

from tests.unit.cli.command import run_process, run_process_json
from vllm_delta_sync.wire import container
from vllm_delta_sync.wire.checkpoint import open_checkpoint


def test_help_answers_within_300_ms_of_processor_time_and_lists_the_commands() -> None:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        before = used()
        done = run_process("--help")
        times.append(used() - before)
        assert done.returncode == 0
        for command in ("inspect", "verify", "export", "bench", "demo"):
            assert command in done.stdout
    assert min(times) < 0.3


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['vllm-delta-sync', '--help']\nfrom vllm_delta_sync.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'torch', 'vllm', 'pydantic', 'numpy', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_every_command_has_help_with_its_json_option(command: str) -> None:
    done = run_process(command, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_inspect_shows_the_versions_of_a_log(tiny: tiny_log.TinyLog) -> None:
    found = run_process_json("inspect", tiny.bucket)
    versions = found["versions"]
    assert [(row["version"], row["kind"], row["step"]) for row in versions] == [
        (0, "base", None),
        (1, "delta", 10),
        (2, "delta", 20),
        (3, "delta", 30),
    ]
    totals = tiny.log.tip().totals
    assert versions[3]["changed"] == totals.changed
    assert versions[3]["bytes_per_change"] == round(totals.bytes / totals.changed, 3)
    assert found["run"] == tiny.log.run
    text = run_process("inspect", tiny.bucket.as_uri())
    assert text.returncode == 0
    assert tiny.log.run in text.stdout


def test_inspect_shows_what_a_file_holds(tiny: tiny_log.TinyLog) -> None:
    manifest = tiny.log.tip()
    table = tiny.log.table(manifest)
    found = run_process_json("inspect", tiny.object(manifest.shards[0].key))
    assert [row["name"] for row in found["tensors"]] == [spec.name for spec in table.tensors]
    assert len(found["blocks"]) == len(table.blocks)
    assert found["metadata"] == {"format": "vllm-delta-sync/1", "run": tiny.log.run, "source": "2", "version": "3"}
    assert [entry["name"] for entry in found["entries"]] == ["table", "blocks"]
    key = tiny.log.latest().manifest.key
    assert run_process_json("inspect", tiny.object(key)) == manifest.model_dump(mode="json")


def test_inspect_shows_hostile_names_as_they_are_and_lets_none_reach_the_terminal(tmp_path: Path) -> None:
    names = ["a[/b]", "[red]c", "\x1b[2Jd", "\x9b2Je\r"]
    path = tmp_path / "model.safetensors"
    path.write_bytes(container.layout([(name, "U8", (0,)) for name in names], {"\x1b]0;f": "\x1b[31m"}))
    done = run_process("inspect", path)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in ("a[/b]", "[red]c", r"\x1b[2Jd", r"\x9b2Je\r"):
        assert shown in done.stdout
    assert not {"\x1b", "\x9b", "\r"} & set(done.stdout)
    done = run_process("inspect", tmp_path / "no\x1b[2J")
    assert (done.returncode, "\x1b" in done.stderr) == (1, False)


def test_verify_passes_a_sound_log(tiny: tiny_log.TinyLog) -> None:
    found = run_process_json("verify", tiny.bucket)
    assert (found["ok"], found["versions"], found["faults"]) == (True, 4, [])


def test_verify_names_what_is_wrong_and_exits_with_1(tiny: tiny_log.TinyLog) -> None:
    key = tiny.log.manifests()[2].shards[0].key
    path = tiny.object(key)
    path.write_bytes(path.read_bytes()[:-1])
    done = run_process("verify", tiny.bucket)
    assert done.returncode == 1
    assert "version 2: digest" in done.stdout
    assert key in done.stdout
    done = run_process("verify", tiny.bucket, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False


def test_export_writes_the_model_of_a_version(tiny: tiny_log.TinyLog, tmp_path: Path) -> None:
    found = run_process_json("export", tiny.bucket, "--version", 2, "--base", tiny.base, "--out", tmp_path / "out")
    assert found["version"] == 2
    exported = open_checkpoint(tmp_path / "out")
    for name, (_, bits) in tiny.models[2].items():
        np.testing.assert_array_equal(exported[name][1], bits)


def test_a_refusal_is_one_line_on_stderr_and_exit_code_1(tmp_path: Path) -> None:
    for arguments in (("inspect", tmp_path / "no"), ("verify", "gopher://x"), ("export", tmp_path, "--out", tmp_path)):
        done = run_process(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2() -> None:
    for arguments in (
        ("insepct",),
        ("inspect",),
        ("verify", "x", "--nonsense"),
        ("export", "x", "--out", "y", "--version", "-1"),
    ):
        done = run_process(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
