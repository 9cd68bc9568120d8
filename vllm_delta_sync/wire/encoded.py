"""What a block is in its shard, and what it says once it is decoded, whatever its codec.

Does not encode or decode: `codecs` does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync import native
from vllm_delta_sync.native import CtxModel
from vllm_delta_sync.native.types import Bits
from vllm_delta_sync.wire.frames import Buffer

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block ready for a shard. `index` and `value` are its stored streams, `raw` their raw sizes in bytes.

    A ctx block has the model that it is coded with, by the same identity as others of its version.
    """

    codec: int
    changed: int
    index: Buffer
    value: Buffer
    raw: tuple[int, int]
    model: CtxModel | None = None

    @property
    def stored(self) -> int:
        """Bytes of the block in its shard."""
        return len(self.index) + len(self.value)

    def digest(self) -> bytes:
        """BLAKE2b-128 of the stored bytes."""
        return digest_of(self.index, self.value)


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBlock:
    """Changes of a block: positions u32[n], ascending from its start; steps u16[n] (of half floats) or values uW[n]."""

    codec: int
    positions: npt.NDArray[np.uint32]
    steps: npt.NDArray[np.uint16] | None
    values: Bits | None

    def new_bits(self, old: Bits) -> Bits:
        """The new bits uW[n] of the elements at `positions`, of which `old` uW[n] are the bits before this version."""
        if self.steps is not None:
            return native.apply_steps(old, self.steps)
        assert self.values is not None, "a block decodes to steps or to values"
        return self.values


def digest_of(*parts: Buffer) -> bytes:
    """BLAKE2b-128 of these bytes, one after the other."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
