"""A trainer's side and a server's side for end-to-end tests: perturb, publish, wait, compare bits.

The server is real `vllm serve`; the trainer changes weights without training, since what changes is all that matters.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from vllm_delta_sync import DeltaLog
from vllm_delta_sync.demo.server import VllmServer
from vllm_delta_sync.log.export import export
from vllm_delta_sync.wire.checkpoint import open_checkpoint

EXTENSION = "vllm_delta_sync.WorkerExtension"
PATIENCE_S = 120.0


class Model:
    """A trainer's weights, bf16, which change a little at every step."""

    def __init__(self, checkpoint: Path) -> None:
        self.state: dict[str, torch.Tensor] = load_file(str(checkpoint / "model.safetensors"))
        self._generator = torch.Generator().manual_seed(0)

    def step(self, share: float = 0.005) -> None:
        """Move about that share of each tensor's elements, most by one step of bf16, and the first one always."""
        for tensor in self.state.values():
            flat = tensor.view(-1).view(torch.int16)
            hits = torch.randint(0, flat.numel(), (max(1, int(flat.numel() * share)),), generator=self._generator)
            hits[0] = 0
            flat[hits.unique()] ^= 1

    def forget(self) -> None:
        """Change so much that completions change, too."""
        norm = self.state["model.norm.weight"]
        norm.copy_((norm.float() * torch.rand(norm.shape, generator=self._generator)).to(norm.dtype))


@contextmanager
def serving(model: Path, bucket: Path, log: Path, *, tensor_parallel: int = 1, **settings: Any) -> Iterator[VllmServer]:
    """A server that follows `bucket`."""
    delta_sync = {"store": f"file://{bucket}", "poll_interval_s": 0.2, **settings}
    options = {
        "worker-extension-cls": EXTENSION,
        "additional-config": {"delta_sync": delta_sync},
        "enable-prompt-tokens-details": True,
    }
    core = own_core() if tensor_parallel == 1 else {}
    with VllmServer(model, log, tensor_parallel=tensor_parallel, options=options, environment=core) as server:
        yield server


def own_core() -> dict[str, str]:
    """Lets a server of one rank compute beside that of another worker of pytest-xdist, not on the same core."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    return {"VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1))}


def metric(server: VllmServer, name: str, **labels: str) -> float:
    """A `vllm:delta_sync_*` sample; 0 when it is not there."""
    for line in server.get("/metrics").splitlines():
        found = re.fullmatch(rf"vllm:delta_sync_{name}\{{(.*)\}} (\S+)", line)
        if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            return float(found[2])
    return 0.0


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for it, not for ever."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain for {what}"
        time.sleep(0.1)


def until_served(server: VllmServer, version: int) -> None:
    until(lambda: metric(server, "served_version") == version, f"version {version} to be served")


def assert_bits(server: VllmServer, log: DeltaLog, base: Path, version: int, folder: Path) -> None:
    """The live tensors of every rank are the slices of the exported checkpoint, byte for byte, and all is there."""
    export(log, version, folder / f"export-{version}", base)
    exported = open_checkpoint(folder / f"export-{version}")
    dumps = folder / f"dump-{version}"
    answers = server.ask_ranks("delta_sync_dump", str(dumps))
    assert all(answer["ok"] for answer in answers), answers
    seen: dict[str, np.ndarray[Any, Any]] = {}
    for rank in range(len(answers)):
        index = json.loads((dumps / f"rank{rank}.json").read_text())
        data = (dumps / f"rank{rank}.bin").read_bytes()
        assert index["version"] == version
        for entry in index["regions"]:
            spec, bits = exported[entry["tensor"]]
            box = tuple(slice(a, b) for a, b in entry["box"])
            wanted = np.asarray(bits).reshape(spec.shape)[box]
            assert data[entry["offset"] : entry["offset"] + entry["nbytes"]] == wanted.tobytes(), entry["tensor"]
            seen.setdefault(spec.name, np.zeros(spec.shape, dtype=bool))[box] = True
    assert seen.keys() == exported.keys()
    assert all(held.all() for held in seen.values())
