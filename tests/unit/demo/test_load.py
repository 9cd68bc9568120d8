"""The streaming load counts what goes wrong, and times what goes right, against a small server of our own."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from vllm_delta_sync.demo.load import Load, Traffic


@contextmanager
def _server(finish_reason: str, status: int = 200) -> Iterator[str]:
    """Streams three tokens 20 ms apart to whoever asks."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.json()
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for reason in (None, None, finish_reason):
            event = {"choices": [{"text": "x", "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.02)
        await response.write(b"data: [DONE]\n\n")
        return response

    loop = asyncio.new_event_loop()

    async def start() -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return str(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result(10)}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def _traffic(url: str, tmp_path: Path) -> Traffic:
    with Load(url, streams=2, result=tmp_path / "traffic.json") as load:
        time.sleep(2.5)
        return load.stop()


def test_streams_that_run_to_their_end_are_timed(tmp_path: Path) -> None:
    with _server("length") as url:
        traffic = _traffic(url, tmp_path)
    assert traffic.failures == () and traffic.finished >= 2
    assert len(traffic.gaps) == 2 * traffic.finished
    assert 15 < traffic.gap_percentile(50, [(0, float("inf"))]) < 1000


@pytest.mark.parametrize(("reason", "status", "why"), [("abort", 200, "'abort'"), ("length", 503, "status 503")])
def test_aborted_and_refused_requests_are_failures(tmp_path: Path, reason: str, status: int, why: str) -> None:
    with _server(reason, status) as url:
        traffic = _traffic(url, tmp_path)
    assert traffic.finished == 0
    assert traffic.failures and all(why in failure for failure in traffic.failures)


def test_percentiles_are_of_the_tokens_in_the_window() -> None:
    gaps = tuple((float(when), 0.001 * when) for when in range(1, 101))
    traffic = Traffic(gaps=gaps, finished=1, failures=())
    assert traffic.gap_percentile(99, [(0, 1000)]) == 100
    assert traffic.gap_percentile(50, [(0, 4), (4, 11)]) == 6
    assert math.isnan(traffic.gap_percentile(50, [(200, 300)]))
