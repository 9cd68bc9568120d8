"""Stores that fail or wait on demand, a tiny model with a real optimiser, and how to compare it with the log.

Holds no assertions.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import torch
from wrapped_store import WrappedStore

from vllm_delta_sync.errors import Unavailable
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.store import ObjectInfo, Store
from vllm_delta_sync.wire.frames import Buffer

State = dict[str, bytes]


class TroubledStore(WrappedStore):
    """A store that passes everything on, except that chosen writes fail or wait.

    `fail`: key → whether this write fails; it is asked before each. `after`: fail only once the write has arrived.
    `gate`: cleared, every write waits for it.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.fail: Callable[[str], bool] = lambda key: False
        self.after = False
        self.gate = threading.Event()
        self.gate.set()
        self.puts: list[str] = []

    def put(self, key: str, data: Buffer, *, create: bool = False, over: str | None = None) -> ObjectInfo:
        assert self.gate.wait(20), "a test forgot to open the gate"
        self.puts.append(key)
        failing = self.fail(key)
        if failing and not self.after:
            raise Unavailable(f"{key}: the store is away")
        info = super().put(key, data, create=create, over=over)
        if failing:
            raise Unavailable(f"{key}: the store is away")
        return info


class Tiny(torch.nn.Module):
    """A model with a tied pair, a persistent buffer, one that is not, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.up = torch.nn.Linear(16, 40)
        self.down = torch.nn.Linear(40, 16)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(8.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(self.down(torch.relu(self.up(hidden))) * self.scale)


class Training:
    """AdamW on random tokens; `step` makes one step and `state` is what must be published."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        tokens = torch.randint(0, 50, (32,))
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(tokens), tokens.roll(1)).backward()
        self.optimizer.step()

    def state(self) -> State:
        return state_of({n: t for n, t in self.model.state_dict().items() if n != "head.weight"})


def state_of(tensors: dict[str, torch.Tensor]) -> State:
    """The published bytes of tensors: floats as bf16."""
    cast = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in cast.items()}


def logged(store: Store, version: int | None = None, base: object = None) -> State:
    """The published bytes at a version of the current run (None: the tip), from the log alone."""
    log = DeltaLog.open(store)
    found = log.materialize(log.tip().version if version is None else version, base)  # type: ignore[arg-type]
    return {name: np.ascontiguousarray(bits).tobytes() for name, (_, bits) in found.items()}


def digest(state: State) -> str:
    """A SHA-256 (hex) that is the same exactly for equal states."""
    return hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()
