"""A controller of two ranks and what can be told to it: tips, steps, proofs, staged effects.

Holds the few assertions that every way through it has to keep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.actions import Action, Commit, Committed, Event, Send, Trace, Traced
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.controller import Controller
from vllm_delta_sync.serving.traced import RankLayout
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import (
    AnchorFile,
    AnchorRef,
    Found,
    LatestPointer,
    ObjectRef,
    ShardRef,
    TableRef,
    Totals,
)
from vllm_delta_sync.wire.tensors import TensorSpec

RUN, OTHER = "ab" * 16, "cd" * 16
SPECS = (TensorSpec("norm", "BF16", (4,)), TensorSpec("proj", "BF16", (8, 4)))
TENSOR_LANES = np.array([[5] * 4, [3] * 4], dtype=np.uint32)
ONE = np.array([[1, 2, 3, 4]], dtype=np.uint32)


def ref(version: int, branch: int = 0) -> ObjectRef:
    return ObjectRef(key=f"versions/{version}", sha256=f"{branch:032x}{version:032x}", size=100)


def root(version: int) -> str:
    return f"{version + 1000:064x}"


def place(version: int) -> msg.Place:
    return msg.Place(version, ref(version), root(version))


def latest(version: int, *, pin: int | None = None, run: str = RUN, branch: int = 0) -> LatestPointer:
    manifest = ref(version, branch)
    base = manifest if version == 0 else ref(0)
    return LatestPointer(run=run, sequence=version, version=version, manifest=manifest, base=base, pin=pin)


def tip(version: int, **changes: Any) -> msg.Tip:
    return msg.Tip(latest(version, **changes))


def hop(to: int, source: int | None = None, kind: str | None = None) -> Hop:
    """From the version before, unless it is said from where; a step over more than one is a fold."""
    source = to - 1 if source is None else source
    kind = kind or ("delta" if source == to - 1 else "fold")
    shard = ShardRef(key=f"{kind}s/{source}-{to}", sha256="0" * 64, size=100, data_start=50)
    payload: dict[str, Any] = {
        "table": TableRef(start=8, size=10, sha256="0" * 64),
        "shards": (shard,),
        "totals": Totals(tensors=2, elements=36, changed=7, bytes=100),
    }
    if kind == "anchor":
        file = AnchorFile(key=f"anchors/{to}/model.safetensors", sha256="0" * 64, size=100)
        payload = {
            "checkpoint": AnchorRef(prefix=f"anchors/{to}", files=(file,)),
            "states": Found(key=f"anchors/{to}/states", sha256="0" * 64, size=10) if to else None,
        }
    follows: dict[str, Any] = {}
    if kind != "anchor":
        follows = {"parent": ref(source)} if kind == "delta" else {"before": root(source)}
    return Hop(
        kind=kind,  # type: ignore[arg-type]
        source=None if kind == "anchor" else source,
        to=to,
        target=ref(to),
        after=root(to),
        **follows,
        **payload,
    )


def plan(held: int | None, failed: Hop | None = None, too_large: bool = False, **changes: Any) -> Send:
    """What the leader is asked when LATEST says `changes` (of `tip`)."""
    return Send(msg.Plan(latest(**changes), None if held is None else place(held), failed, too_large), 0)


def whole(tensor: str, numel: int, storage: int = 0) -> Region:
    return Region(tensor, (numel,), 0, (1,), storage, 0, (1,), "BF16")


def half(tensor: str, start: int) -> Region:
    return Region(tensor, (16,), start, (1,), 0, 0, (1,), "BF16")


# Rank 0 and 1 both hold `norm` (a copy), and half of `proj` each.
LAYOUTS = tuple(RankLayout((whole("norm", 4), half("proj", 16 * rank)), ()) for rank in (0, 1))


def make(**changes: object) -> Controller:
    settings: dict[str, object] = {"ignore_unmapped": False, "stop_on_error": False, "audit_every": 0, **changes}
    return Controller(2, **settings)  # type: ignore[arg-type]


def tell(controller: Controller, event: Event, now: float, rank: int = 0, late: int = 0) -> list[Action]:
    """Handle an event as an answer to the latest command (or to one `late` commands ago); attempts read as 0."""
    if hasattr(event, "attempt"):
        event = replace(event, attempt=controller._attempts.number - late)
    actions: list[Action] = []
    for action in controller.handle(event, now, rank):
        if isinstance(action, Send):
            action = replace(action, message=replace(action.message, attempt=0))
        actions.append(Trace(0) if isinstance(action, Trace) else action)
    return actions


def proved(norm: int, proj: int) -> msg.Proved:
    return msg.Proved(np.array([[norm] * 4, [proj] * 4], dtype=np.uint32), 0.1)


def staged(version: int, norm: int, proj: int, expected: tuple[int, int]) -> msg.Staged:
    lanes = np.array([[norm] * 4, [proj] * 4], dtype=np.uint32)
    effects = np.array([[e] * 4 for e in expected], dtype=np.uint32)
    return msg.Staged(version, (0, 1), lanes, (0, 1), effects, 100, 50, None, 7, version * 10, 0.1, 0.2)


def found(at: int | None) -> msg.Located:
    return msg.Located(None if at is None else place(at), TENSOR_LANES, "" if at is not None else "'proj' differs")


def joined(controller: Controller, at: int | None = 0, latest: int = 0, **changes: Any) -> list[Action]:
    """Up to the proof that the weights are those of version `at`."""
    tell(controller, tip(latest, **changes), 0.0)
    for rank in (0, 1):
        tell(controller, msg.BaseLoaded(False), 0.0, rank)
    tell(controller, Traced(0, SPECS, LAYOUTS), 0.0)
    return prove(controller, at)


def prove(controller: Controller, at: int | None) -> list[Action]:
    for rank in (0, 1):
        tell(controller, proved(5, rank + 1), 0.0, rank)
    tell(controller, found(at), 0.0)
    held = None if at is None else place(at)
    tell(controller, msg.Holding(held), 0.0, 0)
    return tell(controller, msg.Holding(held), 0.0, 1)


def stage(controller: Controller, step: Hop) -> list[Action]:
    """From the plan to what follows when every rank has staged the step."""
    assert tell(controller, msg.Planned(step), 0.0) == [Send(msg.Stage(step))]
    tell(controller, staged(step.to, 3, 1, (3, 3)), 0.0, 0)
    return tell(controller, staged(step.to, 3, 2, (3, 3)), 0.0, 1)


def take(controller: Controller, step: Hop, run: str = RUN) -> list[Action]:
    """From the plan to the end of the commit."""
    assert stage(controller, step) == [Commit(run, step.to)]
    return tell(controller, Committed(step.to, 0.01), 1.0)
