"""A little fused model on several ranks, its trainer's view, and the ranks' side of a log; no vLLM, no threads.

The loader fuses q, k and v, splits by rank along dim 0 and dim 1, replicates the norm, widens a bias and pads the
vocabulary: what vLLM's own loaders do, small enough to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from vllm_delta_sync import Publisher, kernels
from vllm_delta_sync.log import DeltaLog, FoldSchedule
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.locate import locate
from vllm_delta_sync.serving.proof import Proof
from vllm_delta_sync.serving.rank import Rank
from vllm_delta_sync.wire.hop import Hop

HIDDEN, VOCABULARY, PADDING = 16, 10, 4


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """The trainer's tensors, bf16."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "embed": random(VOCABULARY, HIDDEN),
        "q": random(8, HIDDEN),
        "k": random(4, HIDDEN),
        "v": random(4, HIDDEN),
        "o_proj.weight": random(HIDDEN, 8),
        "norm": random(HIDDEN),
        "bias": random(HIDDEN),
        "scale": random(),
    }


def train(state: dict[str, torch.Tensor], seed: int) -> None:
    """One step: a few elements of every tensor move, some by far."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        flat = tensor.view(-1)
        hit = torch.rand(flat.shape, generator=generator) < 0.2
        hit[0] = True
        flat[hit] = (flat[hit].float() * (1 + torch.randn(int(hit.sum()), generator=generator) * 0.1)).to(
            torch.bfloat16
        )


class ServedModel(torch.nn.Module):
    """One rank of several.

    Args:
        like: tensors of the sizes that it serves.
        padding: to a multiple of which the vocabulary is padded.
    """

    def __init__(self, rank: int, ranks: int, like: Mapping[str, torch.Tensor], padding: int = PADDING) -> None:
        super().__init__()
        self.rank, self.ranks, self.padding = rank, ranks, padding
        self.rows = {name: like[name].shape[0] for name in ("embed", "q", "k", "v")}
        self.per_rank = -(-self.rows["embed"] // padding) * padding // ranks
        hidden, inner = like["o_proj.weight"].shape

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.embed = parameter(self.per_rank, hidden)
        self.qkv = parameter(sum(self.rows[name] for name in "qkv") // ranks, hidden)
        self.o = parameter(hidden, inner // ranks)
        self.norm = parameter(hidden)
        self.bias = parameter(hidden, dtype=torch.float32)
        self.scale = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in given:
            if name in ("q", "k", "v"):
                rows = tensor.shape[0] // self.ranks
                first = sum(self.rows[before] for before in "qkv"[: "qkv".index(name)]) // self.ranks
                self.qkv.data[first : first + rows].copy_(tensor[self.rank * rows : (self.rank + 1) * rows])
            elif name == "embed":
                part = tensor[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]
                self.embed.data[: part.shape[0]].copy_(part)
                self.embed.data[part.shape[0] :].fill_(0)
            elif name == "o_proj.weight":
                columns = tensor.shape[1] // self.ranks
                self.o.data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif name in ("norm", "bias", "scale"):
                getattr(self, name).data.copy_(tensor)
            loaded.add(name)
        return loaded


class Fleet:
    """Ranks of the little model, without a log.

    Args:
        served: what the ranks have loaded.
        policy: which kernels patch.
        limit: max_staged_bytes.
        cache: what the ranks share.
        padding: to a multiple of which they pad the vocabulary.
    """

    def __init__(
        self,
        served: dict[str, torch.Tensor],
        ranks: int = 2,
        policy: str = "auto",
        limit: int = 1 << 30,
        cache: NodeCache | None = None,
        padding: int = PADDING,
    ) -> None:
        self.models = [ServedModel(rank, ranks, served, padding) for rank in range(ranks)]
        for model in self.models:
            model.load_weights(served.items())
        self.ranks = [
            Rank(rank, lambda device: kernels.select(policy, device), limit, cache)  # type: ignore[arg-type]
            for rank in range(ranks)
        ]

    def commit(self, version: int) -> None:
        for rank in self.ranks:
            rank.commit(version)

    def serves(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether every live bit is the one that loading `state` anew gives."""
        for model in self.models:
            fresh = ServedModel(model.rank, model.ranks, state, model.padding)
            fresh.load_weights(state.items())
            for live, wanted in zip(model.parameters(), fresh.parameters(), strict=True):
                if not np.array_equal(_bits(live), _bits(wanted)):
                    return False
        return True


class Following(Fleet):
    """Ranks that follow one log by hand; see `Fleet`.

    Args:
        bucket: where the log is.
    """

    def __init__(
        self,
        bucket: Path,
        served: dict[str, torch.Tensor],
        ranks: int = 2,
        policy: str = "auto",
        limit: int = 1 << 30,
        cache: NodeCache | None = None,
        padding: int = PADDING,
    ) -> None:
        super().__init__(served, ranks, policy, limit, cache, padding)
        self.log = DeltaLog.open(bucket)

    def deltas(self) -> list[Hop]:
        """The steps to versions 1 … tip."""
        manifests = self.log.manifests()
        refs = [manifest.parent for manifest in manifests[2:]] + [self.log.latest().manifest]
        return [Hop.over(m, ref) for m, ref in zip(manifests[1:], refs, strict=True) if ref is not None]

    def join(self) -> msg.Located:
        """Load the base, trace, prove, locate, and hold what was found."""
        pointer = self.log.latest()
        layouts = []
        for rank, model in zip(self.ranks, self.models, strict=True):
            rank.load_base(self.log, pointer.base)
            layouts.append(rank.trace(model))
        base = self.ranks[0].base
        assert base is not None
        self.proof = Proof.of_layouts(layouts, base.tensors, ignore_unmapped=False)
        lanes = self.proof.sum({rank.number: rank.prove().lanes for rank in self.ranks})
        located = locate(self.log, pointer, base, lanes, self.proof.skipped)
        for rank in self.ranks:
            rank.join(located.place, located.lanes)
        return located

    def stage(self, hop: Hop) -> None:
        """On every rank, and check the effect on the hash."""
        self.proof.check_staged([rank.stage(hop) for rank in self.ranks])

    def take(self, hop: Hop) -> None:
        self.stage(hop)
        self.commit(hop.to)

    def follow(self) -> None:
        """Up to the tip, delta by delta."""
        for hop in self.deltas():
            if hop.to > (self.ranks[0].version or 0):
                self.take(hop)


def publish(
    bucket: Path,
    state: dict[str, torch.Tensor],
    steps: int,
    *,
    folds: bool = False,
    anchor: Literal["auto", "never"] = "auto",
) -> list[dict[str, torch.Tensor]]:
    """Begin a run at `state`, train and publish; returns the state at every version.

    Args:
        folds: whether to fold versions, two, four, … at a time.
        anchor: whether version 0 brings a checkpoint.
    """
    states = [{name: tensor.clone() for name, tensor in state.items()}]
    schedule = FoldSchedule(base=2, levels=5, reach=0) if folds else None
    with Publisher.open(bucket, base=state, anchor=anchor, folds=schedule, anchors=None) as publisher:
        for step in range(1, steps + 1):
            train(state, step)
            publisher.publish(state, step=step)
            states.append({name: tensor.clone() for name, tensor in state.items()})
    return states


def _bits(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
