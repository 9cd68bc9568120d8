"""Runs a command beside a stand-in Hub that it may write to: `python -m tests.hub.around COMMAND …`.

Ends with the command's own exit code. Does not look at what it does there.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.hub.process import HubProcess


def main() -> int:
    with HubProcess() as hub:
        return subprocess.call(sys.argv[1:], env={**os.environ, **hub.environment})


if __name__ == "__main__":
    sys.exit(main())
