"""The command line, `vllm-delta-sync`.

Does not import a command before it is used: `--help` answers at once.
"""

from __future__ import annotations

from vllm_delta_sync.cli.main import main

__all__ = ["main"]
