"""Keeps a number of streaming completions running against a server, in a process of its own, and times every token.

Does not share an interpreter with the trainer: its clock must not wait for anyone's lock or priority.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TOKENS = 240  # a request; short ones would put the prefill of the next into the 99th percentile of gaps
_FINISH_GRACE_S = 120.0

_PROMPTS = (
    "Explain how a tide table is made, step by step.",
    "Write a letter from a lighthouse keeper to her brother.",
    "List the parts of a bicycle and say what each is for.",
    "Tell the story of a fox who learned to count.",
    "Describe a small town on a rainy Sunday morning.",
    "What should a beginner know about baking bread?",
)


@dataclass(frozen=True)
class Traffic:
    """What the streams saw."""

    gaps: tuple[tuple[float, float], ...]  # (time.monotonic() at a token's arrival, seconds since the last)
    finished: int  # requests that ran to their last token
    failures: tuple[str, ...]  # one sentence per request that was refused, broken off or aborted

    def gap_percentile(self, percent: float, windows: Sequence[tuple[float, float]]) -> float:
        """Milliseconds between two tokens of a stream, for those that arrived in any [start, end); NaN if none did."""
        gaps = sorted(gap for when, gap in self.gaps if any(start <= when < end for start, end in windows))
        if not gaps:
            return float("nan")
        return 1e3 * gaps[min(len(gaps) - 1, int(len(gaps) * percent / 100))]


class Load:
    """A context manager: the streams run inside the block. `stop` lets the requests in flight finish.

    Args:
        url: root of an OpenAI-compatible server that serves the model `demo`.
        streams: requests in flight at any time.
        result: file that the child leaves its measurements in.
    """

    def __init__(self, url: str, streams: int, result: Path) -> None:
        self._command = [sys.executable, "-m", __name__, url, str(streams), str(result)]
        self._result = result
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, process_group=0)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> Traffic:
        """Start no more requests, wait for those in flight, and return what all of them saw.

        Raises:
            RuntimeError: the child ended by itself or does not end.
        """
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            raise RuntimeError("the load process ended before it was told to; its output is above")
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(_FINISH_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"streams were still unfinished after {_FINISH_GRACE_S:.0f} s") from None
        if code != 0:
            raise RuntimeError(f"the load process failed with code {code}; its output is above")
        found = json.loads(self._result.read_text())
        gaps = tuple((when, gap) for when, gap in found["gaps"])
        return Traffic(gaps=gaps, finished=found["finished"], failures=tuple(found["failures"]))


class _Streams:
    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self.stopping = False
        self.gaps: list[tuple[float, float]] = []
        self.finished = 0
        self.failures: list[str] = []

    async def run(self, first: int, step: int) -> None:
        """One stream: a request after another, each with a prompt that no other request has."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_read=_FINISH_GRACE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for number in itertools.count(first, step):
                if self.stopping:
                    return
                try:
                    await self._request(session, number)
                    self.finished += 1
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    self.failures.append(f"request {number}: {type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)

    async def _request(self, session: Any, number: int) -> None:
        body = {
            "model": "demo",
            "prompt": f"{number}. {_PROMPTS[number % len(_PROMPTS)]}\n",
            "max_tokens": TOKENS,
            "temperature": 0.8,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
        previous, reason, done = None, None, False
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                done = done or data == "[DONE]"
                if not data or done:
                    continue
                now = time.monotonic()
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(f"error in the stream: {event['error']}")
                if previous is not None:
                    self.gaps.append((now, now - previous))
                previous, reason = now, event["choices"][0]["finish_reason"] or reason
        if reason != "length" or not done:
            raise ValueError(f"ended with finish_reason {reason!r} instead of 'length'")


async def _main(url: str, streams: int, result: Path) -> None:
    state = _Streams(url)

    def stop() -> None:
        state.stopping = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await asyncio.gather(*(state.run(first, streams) for first in range(streams)))
    found = {"gaps": state.gaps, "finished": state.finished, "failures": state.failures}
    result.write_text(json.dumps(found))


def _command_line(arguments: Sequence[str]) -> None:
    url, streams, result = arguments
    asyncio.run(_main(url, int(streams), Path(result)))


if __name__ == "__main__":
    _command_line(sys.argv[1:])
