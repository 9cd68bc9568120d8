"""Which elements of which tensors a reader holds, and so which blocks of a version concern it.

Does not know where the elements live, and does not fetch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.wire import canonical_json
from vllm_delta_sync.wire.table import Block

MAX_BYTES = 64 << 20  # of needs in their byte form

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # (start, end) in elements, ascending, apart from each other


@dataclass(frozen=True)
class Needs:
    """Element ranges by tensor name, flat and row-major; `ranges` None stands for every element of every tensor.

    Args:
        ranges: any order, may overlap; kept ascending and merged.
        elements: of the whole model: what covers them all is everything. 0 when not known.
    """

    ranges: Mapping[str, Ranges] | None
    elements: int = 0
    _starts: Mapping[str, list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranges is None:
            return
        merged = {name: found for name, given in self.ranges.items() if (found := _merged(given))}
        covered = sum(end - start for found in merged.values() for start, end in found)
        object.__setattr__(self, "ranges", None if 0 < self.elements <= covered else merged)
        object.__setattr__(self, "_starts", {name: [start for start, _ in found] for name, found in merged.items()})

    @classmethod
    def everything(cls) -> Needs:
        """All of the model."""
        return cls(None)

    def wants(self, block: Block) -> bool:
        """Whether any element of the block is needed."""
        if self.ranges is None:
            return True
        found = self.ranges.get(block.spec.name)
        if not found:
            return False
        last = bisect_right(self._starts[block.spec.name], block.start + block.count - 1) - 1
        return last >= 0 and found[last][1] > block.start

    def with_those_of(self, others: Iterable[Needs]) -> Needs:
        """What this reader or any of the others needs."""
        together: dict[str, list[tuple[int, int]]] = {}
        for needs in (self, *others):
            if needs.ranges is None:
                return Needs.everything()
            for name, found in needs.ranges.items():
                together.setdefault(name, []).extend(found)
        return Needs({name: tuple(found) for name, found in together.items()}, self.elements)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        ranges = None if self.ranges is None else {name: list(map(list, found)) for name, found in self.ranges.items()}
        return canonical_json.dump({"elements": self.elements, "ranges": ranges})

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Needs:
        """Read what `to_bytes` gave; raises MalformedObject naming `what`."""
        fields = canonical_json.parse(data, what, max_bytes=MAX_BYTES)
        ranges, elements = fields.get("ranges"), fields.get("elements")
        if set(fields) != {"ranges", "elements"} or type(elements) is not int or elements < 0:
            raise MalformedObject(f"{what}: does not state elements and ranges")
        if ranges is None:
            return cls(None, elements)
        if not isinstance(ranges, dict):
            raise MalformedObject(f"{what}: ranges must map tensors to lists")
        return cls({name: _checked(found, what) for name, found in ranges.items()}, elements)


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for start, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def _checked(found: object, what: str) -> Ranges:
    if not isinstance(found, list):
        raise MalformedObject(f"{what}: the ranges of a tensor must be a list")
    for pair in found:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)):
            raise MalformedObject(f"{what}: {str(pair)[:80]} is not a range of elements")
    return tuple((start, end) for start, end in found)
