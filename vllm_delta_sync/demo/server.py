"""One `vllm serve` as a child process: started on a free port, waited for, asked over HTTP, stopped with its workers.

Does not know what the server is used for, and does not import vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

MAX_MODEL_LEN = 1024
_STOP_GRACE_S = 20.0


class ServerFailed(RuntimeError):
    """The server ended, or did not become healthy in time; the message carries the end of its log."""


class VllmServer:
    """A context manager: the server is healthy inside the block and gone, workers included, after it.

    Args:
        model: checkpoint directory; also the model's name in requests is `demo`.
        log: file for the server's output.
        tensor_parallel: ranks; each gets one CPU core.
        options: further options of `vllm serve` by their long names, as in its YAML.
        environment: further environment variables.
        start_timeout_s: seconds until it must be healthy.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        tensor_parallel: int = 1,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.log = log
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._options = {
            "served-model-name": "demo",
            "host": "127.0.0.1",
            "port": int(self.url.rpartition(":")[2]),
            "dtype": "bfloat16",
            "max-model-len": MAX_MODEL_LEN,
            "enforce-eager": True,
            "tensor-parallel-size": tensor_parallel,
            **(options or {}),
        }
        self._model = model
        # Rank r computes on core r alone: what is left over belongs to the trainer and the HTTP side.
        self._environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tensor_parallel)),
            "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, through which the demo looks at live weights
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        config = self.log.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(self._options, sort_keys=False))
        # By module, not by the `vllm` script: the script may not be on PATH, and this interpreter certainly has vLLM.
        vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command = [*vllm, "serve", str(self._model), "--config", str(config)]
        # A process group to stop it by, but no session of its own: Linux shares cores between sessions first, and only
        # then by niceness.
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                process_group=0,
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask the server to end, then kill whatever is left of its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def get(self, path: str) -> str:
        """The body of a GET; raises urllib.error.URLError on any failure."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            body: bytes = response.read()
        return body.decode()

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 300.0) -> Any:
        """The JSON answer to a POST of JSON; raises urllib.error.URLError on any failure."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)

    def ask_ranks(self, method: str, *arguments: str) -> list[Any]:
        """Call a worker method on every rank; its results in rank order."""
        results: list[Any] = self.post("/collective_rpc", {"method": method, "args": list(arguments)})["results"]
        return results

    def complete(self, prompt: str, max_tokens: int) -> str:
        """A greedy completion of exactly `max_tokens` tokens."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        text: str = self.post("/v1/completions", body)["choices"][0]["text"]
        return text

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"vllm serve ended with code {process.returncode}; {self._end_of_log()}")
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise ServerFailed(f"vllm serve was not healthy after {self._start_timeout_s:.0f} s; {self._end_of_log()}")

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"the end of {self.log}:\n" + "\n".join(lines[-25:])


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # all of it is gone already
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
