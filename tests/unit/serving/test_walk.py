"""Fifty versions of a random walk, coded against the values before: a replica and two ranks go along, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.unit.serving.fleet import Following
from vllm_delta_sync import Publisher
from vllm_delta_sync.log.replica import Replica
from vllm_delta_sync.wire.codec_rules import CTX

VERSIONS = 50
HIDDEN = 16
SHAPES = {
    "embed": (4100, HIDDEN),  # padded to 4160 and split by rows, so that the second rank has fewer
    "q": (128, HIDDEN),  # split by rows, and fused with the next two
    "k": (64, HIDDEN),
    "v": (64, HIDDEN),
    "o_proj.weight": (HIDDEN, 128),  # split by columns
    "norm": (HIDDEN,),  # on both ranks
    "bias": (HIDDEN,),  # on both, as fp32
    "scale": (),
}


def walk(state: dict[str, torch.Tensor], random: np.random.Generator) -> None:
    """One step of some of the tensors, of a size between one that hardly shows and one that moves most elements."""
    size = 10.0 ** random.uniform(-6, -3)
    for name, tensor in state.items():
        if name == "embed" or random.random() < 0.7:
            noise = torch.from_numpy(random.normal(0, size, tuple(tensor.shape)).astype(np.float32))
            state[name] = (tensor.float() + noise).to(torch.bfloat16)


def same(replica: Replica, state: dict[str, torch.Tensor]) -> bool:
    return all(
        np.array_equal(bits, state[name].reshape(-1).view(torch.int16).numpy().view(np.uint16))
        for name, (_, bits) in replica.tensors.items()
    )


def test_a_replica_and_two_ranks_go_along_a_random_walk(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    state = {
        name: torch.from_numpy(random.normal(0, 0.02, shape).astype(np.float32)).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    base, states = dict(state), []
    with Publisher.open(tmp_path, base=state, folds=None, anchors=None) as publisher:
        for _ in range(VERSIONS):
            walk(state, random)
            publisher.publish(state)
            states.append(dict(state))
    served = Following(tmp_path, base, 2, padding=64)
    replica = Replica(served.log)
    served.join()
    coded, others = 0, 0  # changes, by whether their blocks are coded against the values before
    for hop, wanted in zip(served.deltas(), states, strict=True):
        replica.apply(hop)
        served.take(hop)
        assert replica.root == served.log.manifest(hop.target).state_root
        assert same(replica, wanted) and served.serves(wanted), f"version {hop.to}"
        rows = served.log.table(hop).blocks
        coded += sum(block.changed for block in rows if block.codec == CTX)
        others += sum(block.changed for block in rows if block.codec != CTX)
    assert replica.version == VERSIONS
    assert coded > others, f"{coded} of {coded + others} changes"
