"""The closed table of element types that may appear on the wire.

Does not know torch: bits are numpy unsigned integers of the dtype's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_delta_sync.errors import MalformedObject

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: its safetensors name, its code in the table and its width in bytes."""

    name: str
    code: int
    width: int
    half: bool = False  # a 2-byte float, whose changes may be coded as steps of the float's order
    integer: bool = False  # in two's complement, or without a sign

    @property
    def bits(self) -> np.dtype[Any]:
        """The numpy dtype that holds the bits of one element."""
        return _UNSIGNED[self.width]


_ALL = (
    Dtype("BF16", 1, 2, half=True),
    Dtype("F16", 2, 2, half=True),
    Dtype("F32", 3, 4),
    Dtype("F64", 4, 8),
    Dtype("I8", 5, 1, integer=True),
    Dtype("U8", 6, 1, integer=True),
    Dtype("I16", 7, 2, integer=True),
    Dtype("I32", 8, 4, integer=True),
    Dtype("I64", 9, 8, integer=True),
    Dtype("BOOL", 10, 1, integer=True),
    Dtype("F8_E4M3", 11, 1),
    Dtype("F8_E5M2", 12, 1),
)
_BY_NAME = {dtype.name: dtype for dtype in _ALL}
_BY_CODE = {dtype.code: dtype for dtype in _ALL}


def by_name(name: str) -> Dtype:
    """The dtype of a safetensors name; raises MalformedObject for any other."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise MalformedObject(f"dtype {name[:80]!r} is not one of {', '.join(_BY_NAME)}") from None


def by_code(code: int) -> Dtype:
    """The dtype of a table code; raises MalformedObject for any other."""
    try:
        return _BY_CODE[code]
    except KeyError:
        raise MalformedObject(f"dtype code {code} is not one of 1 to {len(_ALL)}") from None
