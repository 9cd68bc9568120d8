"""Folding and anchoring from the command line."""

from __future__ import annotations

import tiny_log

from tests.unit.cli.command import run, run_json


def test_a_fold_is_written_and_the_catalog_names_it(tiny: tiny_log.TinyLog) -> None:
    found = run_json("fold", tiny.bucket, "--from", 0, "--to", 3)
    fold = tiny.log.catalog().folds[0]
    assert found == {
        "run": tiny.log.run,
        "folds": [{"from": 0, "to": 3, "bytes": fold.totals.bytes, "changed": fold.totals.changed}],
    }
    assert (fold.source, fold.to) == (0, 3)


def test_the_folds_of_a_schedule_are_written(tiny: tiny_log.TinyLog) -> None:
    done = run("fold", tiny.bucket, "--schedule", "--power", 2, "--levels", 1, "--reach", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("0 to 2: ")
    assert done.stdout.splitlines()[-1].startswith("1 folds, ")


def test_a_fold_without_ends_or_with_too_many_says_what_to_give(tiny: tiny_log.TinyLog) -> None:
    for arguments in ((), ("--from", 0), ("--from", 1, "--to", 1), ("--schedule", "--to", 3)):
        done = run("fold", tiny.bucket, *arguments)
        assert done.returncode == 1
        assert "--from" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_anchor_is_written_and_the_catalog_names_it(tiny: tiny_log.TinyLog) -> None:
    found = run_json("anchor", tiny.bucket, "--version", 2, "--base", tiny.base)
    anchor = tiny.log.catalog().anchors[0]
    assert (found["version"], found["bytes"]) == (2, anchor.bytes)
    assert sorted(found["files"]) == ["config.json", "model.safetensors"]
    assert found["at"].endswith(anchor.checkpoint.prefix)
