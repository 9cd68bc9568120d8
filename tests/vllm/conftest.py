"""Leaves this folder out where vLLM is not installed: everything in it needs the real thing."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["*"]
