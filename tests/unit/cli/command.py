"""The command line as a user runs it, and the same within this process.

Holds the few assertions that every command has to keep.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from vllm_delta_sync.cli import main

_ENTRY = "import sys; sys.argv[0] = 'vllm-delta-sync'; from vllm_delta_sync.cli import main; main()"


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


def command_line(*arguments: object) -> list[str]:
    """What starts a process of its own."""
    return [sys.executable, "-c", _ENTRY, *map(str, arguments)]


def run_process(*arguments: object) -> Done:
    """In a process of its own."""
    done = subprocess.run(command_line(*arguments), capture_output=True, text=True, timeout=60, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def run(*arguments: object) -> Done:
    """Within this process: to start one takes longer than all that most commands do in a test."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["vllm-delta-sync", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
    return Done(code, out.getvalue(), err.getvalue())


def run_json(*arguments: object) -> Any:
    """`run` with --json: one object on one line."""
    return _parsed(run(*arguments, "--json"))


def run_process_json(*arguments: object) -> Any:
    """`run_process` with --json."""
    return _parsed(run_process(*arguments, "--json"))


def _parsed(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)
