"""`vllm-delta-sync watch`: versions as they come, each fetched and verified, then dropped.

Does not hold a model, so it proves every digest but no state hash.
"""

from __future__ import annotations

import random
import time
from typing import Annotated

import typer

from vllm_delta_sync.cli import output
from vllm_delta_sync.errors import DeltaSyncError, RateLimited
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.tail import Tail
from vllm_delta_sync.wire.hop import Hop

_LONGEST_S = 60.0
_LOOKS_PER_RUN = 12  # between two looks at which run is the current one


def watch(
    uri: Annotated[str, typer.Argument(help="The log: a URI or a path.")],
    interval: Annotated[float, typer.Option(help="Seconds between two looks at LATEST.", min=0.1)] = 5.0,
    from_base: Annotated[bool, typer.Option("--from-base", help="Begin at version 0, not at the latest.")] = False,
    until: Annotated[int | None, typer.Option(help="End with exit code 0 once this version is held.", min=0)] = None,
    run: Annotated[str | None, typer.Option(help="Id of the run; the current one when left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a hop instead of text.")] = False,
) -> None:
    """Print each version as it comes, fetched and verified, until interrupted."""
    tail = Tail(DeltaLog.open(uri, run), from_base=from_base)
    wait, looks = interval, 0
    while until is None or tail.version is None or tail.version < until:
        try:
            looks += 1
            if run is None and looks % _LOOKS_PER_RUN == 0:
                tail = _of_current_run(uri, tail)
            began = time.monotonic()
            for hop in tail.look():
                _show(tail.log, hop, time.monotonic() - began, json)
            wait = interval * random.uniform(0.8, 1.2)  # so that many watchers do not ask in step
        except DeltaSyncError as error:
            typer.echo(output.printable(f"{error.cause}: {error}"), err=True)
            wait = error.retry_after if isinstance(error, RateLimited) else min(2 * wait, _LONGEST_S)
        if until is None or tail.version is None or tail.version < until:
            time.sleep(wait)


def _of_current_run(uri: str, tail: Tail) -> Tail:
    log = DeltaLog.open(uri)
    if log.run == tail.log.run:
        return tail
    typer.echo(f"run {log.run} has taken over from {tail.log.run}", err=True)
    return Tail(log, from_base=True)


def _show(log: DeltaLog, hop: Hop, seconds: float, json: bool) -> None:
    if json:
        output.print_json(
            {
                "run": log.run,
                "kind": hop.kind,
                "source": hop.source,
                "version": hop.to,
                "step": hop.step,
                "bytes": hop.bytes,
                "seconds": round(seconds, 3),
            }
        )
        return
    origin = "anchor" if hop.source is None else f"{hop.kind} from {hop.source}"
    step = "" if hop.step is None else f", step {hop.step}"
    typer.echo(f"version {hop.to}: {origin}, {output.size(hop.bytes)}, {seconds:.2f} s{step}")
