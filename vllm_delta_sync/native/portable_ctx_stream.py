"""What a `ctx` tile is made of, in Python: numbers as symbols and raw bits, and the stream that holds them.

Does not know classes or old values: `portable_ctx` does.
"""

from __future__ import annotations

import numpy as np

from vllm_delta_sync.native.ctx_types import EXACT, SCALE, TOTAL
from vllm_delta_sync.native.types import U16

FLOOR = 1 << 16  # of a state


class Cut(Exception):
    """A tile ends early."""


class Unsayable(Exception):
    """A model has neither a symbol of a tile nor an escape for it."""


def magnitude(v: int) -> tuple[int, int, int]:
    """A number's symbol, and how many raw bits follow it with which value."""
    if v < EXACT:
        return v, 0, 0
    top = v.bit_length() - 1
    bits = top - 2
    return EXACT + 4 * (top - 4) + ((v >> bits) & 3), bits, v & ((1 << bits) - 1)


def bits_after(symbol: int) -> int:
    return 0 if symbol < EXACT else (symbol - EXACT) // 4 + 2


def number_of(symbol: int, raw: int) -> int:
    return symbol if symbol < EXACT else (4 | (symbol - EXACT) & 3) << bits_after(symbol) | raw


def varint(value: int) -> bytes:
    """A number as LEB128."""
    return bytes((value & 0x7F | 0x80,)) + varint(value >> 7) if value >= 0x80 else bytes((value,))


class Writer:
    """Collects a tile's symbols and raw bits in the order of decoding."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._symbols: list[tuple[int, int, int]] = []  # lane, frequency, first slot
        self._raw = self._filled = 0

    def add(self, frequencies: U16, symbol: int, index: int) -> None:
        self._symbols.append((index % self._lanes, int(frequencies[symbol]), int(frequencies[:symbol].sum())))

    def raw(self, value: int, bits: int) -> None:
        self._raw |= value << self._filled
        self._filled += bits

    def number(
        self, frequencies: U16, symbol: int, bits: int, raw: int, escape: tuple[int, int, int], index: int
    ) -> None:
        known = bool(frequencies[symbol])
        self.add(frequencies, symbol if known else escape[0], index)
        self.raw(raw if known else escape[2], bits if known else escape[1])

    def bytes(self) -> bytes:
        """Raises Unsayable."""
        states, words = [FLOOR] * self._lanes, []
        for lane, frequency, start in reversed(self._symbols):
            state = states[lane]
            if not frequency:
                raise Unsayable
            if state >= frequency << (32 - SCALE):
                words.append(state & 0xFFFF)
                state >>= 16
            states[lane] = (state // frequency << SCALE) + state % frequency + start
        front = np.array(states, "<u4").tobytes() + np.array(words[::-1], "<u2").tobytes()
        return front + self._raw.to_bytes((self._filled + 7) // 8, "big")


class Reader:
    """A tile's bytes: states and words from the front, raw bits from the back."""

    def __init__(self, data: bytes, lanes: int) -> None:
        self._data, self._at, self._raw, self._used = data, 4 * lanes, int.from_bytes(data, "big"), 0
        if len(data) < 4 * lanes:
            raise Cut
        self._states = np.frombuffer(data[: 4 * lanes], "<u4").tolist()
        if min(self._states) < FLOOR:
            raise Cut

    def symbol(self, frequencies: U16, index: int) -> int:
        lane = index % len(self._states)
        state = self._states[lane]
        ends, slot = np.cumsum(frequencies), state & (TOTAL - 1)
        symbol = int(np.searchsorted(ends, slot, side="right"))
        frequency = int(frequencies[symbol])
        state = frequency * (state >> SCALE) + slot - (int(ends[symbol]) - frequency)
        if state < FLOOR:
            if self._at + 2 > len(self._data):
                raise Cut
            state = state << 16 | int.from_bytes(self._data[self._at : self._at + 2], "little")
            self._at += 2
        self._states[lane] = state
        return symbol

    def raw(self, bits: int) -> int:
        if self._used + bits > 8 * len(self._data):
            raise Cut
        value = (self._raw >> self._used) & ((1 << bits) - 1)
        self._used += bits
        return value

    def finished(self) -> bool:
        size = (self._used + 7) // 8
        tail = self._data[len(self._data) - size] >> (self._used % 8) if self._used % 8 else 0
        return self._at + size == len(self._data) and not tail and all(state == FLOOR for state in self._states)
