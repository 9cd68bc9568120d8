"""A tiny model with a log of a few versions, for tests of everything that reads logs.

Holds no assertions.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_delta_sync import native
from vllm_delta_sync.log import DeltaLog, LogWriter, TensorUpdate
from vllm_delta_sync.log.base import Tensor
from vllm_delta_sync.wire import dtypes, state_hash
from vllm_delta_sync.wire.checkpoint import write_checkpoint
from vllm_delta_sync.wire.codecs import encode_block
from vllm_delta_sync.wire.manifest import BaseRef, LatestPointer, Manifest
from vllm_delta_sync.wire.tensors import TensorSpec, split_blocks

Model = dict[str, Tensor]

SPECS = (
    TensorSpec("embed.weight", "BF16", (64, 32)),
    TensorSpec("layers.0.norm", "F32", (32,)),
    TensorSpec("layers.0.proj", "F16", (32, 48)),
    TensorSpec("layers.0.scale", "BF16", ()),
    TensorSpec("layers.0.none", "BF16", (0, 4)),
    TensorSpec("layers.1.mask", "BOOL", (600,)),
    TensorSpec("layers.1.steps", "I64", (2, 3)),
)


def random_model(seed: int = 0) -> Model:
    """Random bits for every spec."""
    rng = np.random.default_rng(seed)
    model = {}
    for spec in SPECS:
        raw = rng.integers(0, 2 if spec.dtype == "BOOL" else 256, spec.nbytes, np.uint8)
        model[spec.name] = spec, raw.view(dtypes.by_name(spec.dtype).bits)
    return model


def changed_model(model: Model, seed: int, share: float = 0.05) -> Model:
    """A copy in which about that share of the elements has other bits, and at least one of `embed.weight`."""
    rng = np.random.default_rng(seed)
    new = {name: (spec, bits.copy()) for name, (spec, bits) in model.items()}
    for spec, bits in new.values():
        where = rng.random(spec.numel) < share
        bits[where] ^= bits.dtype.type(1)
    new["embed.weight"][1][seed % 64] ^= 2
    return new


def lanes_of(model: Model) -> dict[TensorSpec, state_hash.Lanes]:
    """State hash lanes of every tensor."""
    return {spec: state_hash.of_tensor(spec, bits) for spec, bits in model.values()}


def updates_between(old: Model, new: Model) -> list[TensorUpdate]:
    """The encoded difference, as a publisher commits it."""
    updates = []
    for name, (spec, bits) in new.items():
        blocks = []
        for start, count in split_blocks(spec):
            part = slice(start, start + count)
            changes = native.diff(old[name][1][part].copy(), bits[part], advance=False)
            if len(changes.positions):
                blocks.append((start, count, encode_block(spec, changes, start, count, bits[part])))
        if blocks:
            updates.append(TensorUpdate(spec, state_hash.of_tensor(spec, bits), blocks))
    return updates


def commit(writer: LogWriter, old: Model, new: Model, step: int | None = None) -> Manifest:
    """Publish `new` after `old`."""
    return writer.commit(updates_between(old, new), state_root=state_hash.state_root(lanes_of(new)), step=step)


def same(found: Mapping[str, Tensor], wanted: Model) -> bool:
    """Whether these are the tensors of a model, bit for bit."""
    return found.keys() == wanted.keys() and all(
        found[name][0] == spec and np.array_equal(found[name][1], bits) for name, (spec, bits) in wanted.items()
    )


def damage(path: Path) -> None:
    """Another last bit."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@dataclass
class TinyLog:
    """A log in `bucket`, whose base checkpoint is in `base`; `models[v]` is the model at version v."""

    bucket: Path
    base: Path
    writer: LogWriter
    models: list[Model] = field(default_factory=list)

    @property
    def log(self) -> DeltaLog:
        """The log, opened anew as a reader does."""
        return DeltaLog.open(str(self.bucket))

    @property
    def run_dir(self) -> Path:
        """Where the run's objects are."""
        return self.bucket / self.writer.log.run

    def object(self, key: str) -> Path:
        """The file of an object of the run."""
        return self.run_dir / key

    def say(self, said: LatestPointer) -> None:
        """What a stale client, a backup or a repair does: LATEST says this, whatever it said before."""
        self.log.store.put("LATEST", said.to_bytes())

    def publish(self, model: Model, step: int | None = None) -> Manifest:
        """Commit the next version."""
        manifest = commit(self.writer, self.models[-1], model, step)
        self.models.append(model)
        return manifest


def build(directory: Path, versions: int = 3, *, anchor: bool = False) -> TinyLog:
    """A log with that many versions after the base."""
    base, model = directory / "base", random_model()
    files = write_checkpoint(base, model.values())
    (base / "config.json").write_text('{"model_type": "tiny"}')
    files.append(base / "config.json")
    writer = LogWriter.create(
        str(directory / "bucket"),
        lanes_of(model),
        base=None if anchor else BaseRef(model=str(base)),
        anchor=files if anchor else (),
    )
    tiny = TinyLog(directory / "bucket", base, writer, [model])
    for version in range(1, versions + 1):
        tiny.publish(changed_model(tiny.models[-1], version), step=10 * version)
    return tiny


def copy(template: TinyLog, directory: Path) -> TinyLog:
    """The same log in another directory, to be damaged; version 0 still names the template's base."""
    bucket, base = directory / "bucket", directory / "base"
    shutil.copytree(template.bucket, bucket)
    shutil.copytree(template.base, base)
    return TinyLog(bucket, base, LogWriter.attach(DeltaLog.open(str(bucket))), list(template.models))
