"""The state hash of tensors and of a whole model: seeds, sums and the state root (docs/protocol.md, *State hash*).

Does not compute lanes element by element itself: that is `native`. Guards against faults, not against forgers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.wire.tensors import TensorSpec

Lanes: TypeAlias = npt.NDArray[np.uint32]  # shape [4]

_DOMAIN = b"vllm-delta-sync state hash 1"


def _shape(spec: TensorSpec) -> bytes:
    return ",".join(map(str, spec.shape)).encode()


def seed(spec: TensorSpec) -> native.Seed:
    """The two 64-bit seeds that key a tensor's hash by its name, dtype and shape."""
    digest = hashlib.sha256(b"\0".join((_DOMAIN, spec.name.encode(), spec.dtype.encode(), _shape(spec)))).digest()
    return native.Seed(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))


def of_tensor(spec: TensorSpec, bits: npt.NDArray[np.unsignedinteger]) -> Lanes:
    """The lanes of a whole tensor, from its bits uW[numel] in row-major order."""
    assert bits.size == spec.numel and bits.itemsize == spec.width, f"{spec}: {bits.size} elements of {bits.dtype}"
    return native.hash_run(bits.reshape(-1), 0, seed(spec))


def add(left: Lanes, right: Lanes) -> Lanes:
    """The lanes of two disjoint parts together (or of a state and a change to it), mod 2**32."""
    return np.add(left, right, dtype=np.uint32)


def to_hex(lanes: Lanes) -> str:
    """32 hex digits: the four lanes, each as eight digits."""
    return "".join(f"{int(lane):08x}" for lane in lanes)


def state_root(states: Mapping[TensorSpec, Lanes]) -> str:
    """SHA-256 (hex) over the state of every tensor of the model, in the order of their names' UTF-8 bytes."""
    digest = hashlib.sha256()
    for spec in sorted(states, key=lambda spec: spec.name.encode()):
        fields = (spec.name.encode(), spec.dtype.encode(), _shape(spec), to_hex(states[spec]).encode())
        digest.update(b"\0".join(fields) + b"\n")
    return digest.hexdigest()
