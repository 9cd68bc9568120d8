"""A synthetic training run whose published bits change as those of a long one do, without training anything.

It stands for fine-tuning at small steps: bf16 weights are the rounding of fp32 masters that lie anywhere within their
rounding cells, and Adam moves each master by a fraction of its cell, in a direction that persists for some ten steps.
Does not stand for what training does to the values themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.bench.step import Model
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire.tensors import TensorSpec

Floats = npt.NDArray[np.float32]

MOMENTUM = 0.9  # of Adam's first moment
DRIFT = 0.1


def specs(elements: int) -> list[TensorSpec]:
    """Tensors of a small transformer, of about that many elements."""
    width = max(64, round((elements / 13) ** 0.5 / 64) * 64)  # as in real models, where ranks split them
    shapes = {
        "embed.weight": (4 * width, width),
        "layers.0.attn.weight": (3 * width, width),
        "layers.0.norm.weight": (width,),
        "layers.0.up.weight": (3 * width, width),
        "layers.0.down.weight": (width, 3 * width),
    }
    return [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]


class WarmWalk:
    """A model of bf16 tensors and its walk: about 0.8 % of the elements change at each step.

    Args:
        elements: of the whole model, about.
        rate: the learning rate; 0.8e-6 beside weights of a deviation of 0.02 gives that share.
        drift: a gradient's mean beside its deviation of 1: the part that does not average out.
    """

    def __init__(self, elements: int, seed: int = 0, *, rate: float = 0.8e-6, drift: float = DRIFT) -> None:
        self._rng = np.random.default_rng(seed)
        self._rate = rate
        self._masters: dict[str, Floats] = {}
        self._momenta: dict[str, Floats] = {}
        self._drifts: dict[str, Floats] = {}
        self._specs = specs(elements)
        for spec in self._specs:
            weights = self._rng.standard_normal(spec.numel, np.float32) * np.float32(0.02)
            cell = np.spacing(np.abs(weights)) * np.float32(1 << 16)  # bf16 has 16 bits fewer than fp32
            jitter = self._rng.random(spec.numel, np.float32) - np.float32(0.5)
            self._masters[spec.name] = rounded(weights) + cell * jitter
            self._drifts[spec.name] = self._rng.standard_normal(spec.numel, np.float32) * np.float32(drift)
            self._momenta[spec.name] = self._drifts[spec.name].copy()
        for _ in range(20):  # until the momenta are what they will be on average
            self.step()

    @property
    def model(self) -> Model:
        """name → (spec, bits u16[numel]) now; copies."""
        return {spec.name: (spec, bits_of(self._masters[spec.name])) for spec in self._specs}

    def step(self) -> None:
        """One step of the optimiser, whose second moment has settled at 1."""
        for spec in self._specs:
            momentum, drift = self._momenta[spec.name], self._drifts[spec.name]
            gradient = self._rng.standard_normal(spec.numel, np.float32) + drift
            momentum *= np.float32(MOMENTUM)
            momentum += np.float32(1 - MOMENTUM) * gradient
            self._masters[spec.name] -= np.float32(self._rate) * momentum

    def models(self, versions: int) -> Iterator[Model]:
        """The model before the first step and after each of `versions`."""
        yield self.model
        for _ in range(versions):
            self.step()
            yield self.model


def bits_of(values: Floats) -> Bits:
    """bf16 bits of finite fp32 values, rounded to nearest even."""
    raw = values.view(np.uint32)
    return ((raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def rounded(values: Floats) -> Floats:
    """fp32 values rounded to bf16."""
    return (bits_of(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
