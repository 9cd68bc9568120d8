"""Starts a stand-in Hub in a process of its own and holds its controls.

Does not talk to it as a client would: that is the real client's part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
WRITER, READER = "hf_writer", "hf_reader"


class HubProcess:
    """A context manager: the stand-in runs inside the block, with one token that may write and one that may read.

    Args:
        page: entries in one page of a listing.
    """

    def __init__(self, page: int = 1000) -> None:
        self._command = [sys.executable, "-m", "tests.hub", "--attached", "--page", str(page)]
        self._command += ["--token", f"{WRITER}:write", "--token", f"{READER}:read"]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"the stand-in Hub did not start: exit code {self._process.wait()}")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.communicate()  # closes its input, which ends it

    @property
    def environment(self) -> dict[str, str]:
        """What a client's process needs: where the Hub is, and the token that may write."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": WRITER}

    def control(self, **wanted: Any) -> dict[str, int]:
        """Set `rights`, `quotas` ({class: [limit, seconds]}), `faults`, … as `app.Hub` says; returns the counts."""
        request = urllib.request.Request(f"{self.url}/control", data=json.dumps(wanted).encode())
        with urllib.request.urlopen(request, timeout=10) as response:
            counts: dict[str, int] = json.load(response)
        return counts

    def counts(self) -> dict[str, int]:
        """Requests so far by class (`api`, `resolver`, `cas`) and by route."""
        return self.control()

    def fault(self, kind: str, on: str, **details: Any) -> None:
        """Let one fault befall the next requests that fit it, and no other; see tests.hub.faults."""
        self.control(faults=[{"kind": kind, "on": on, **details}])

    def heal(self) -> None:
        """No more faults and no quotas, all tokens as at the beginning, counts from zero."""
        self.control(
            faults=[], quotas={}, rights={WRITER: "write", READER: "read"}, xet_token_life_s=900, forget_counts=True
        )
