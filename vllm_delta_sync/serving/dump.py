"""Writes one rank's live weights to disk, each region as a box of its checkpoint tensor.

For checks that must not share code with the state hash: what it writes can be compared byte for byte with slices of a
checkpoint by anyone. Reads live memory as it is; let nothing commit meanwhile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_delta_sync.errors import StateError, UnsupportedLayout
from vllm_delta_sync.serving.affine import Region
from vllm_delta_sync.serving.rank import Rank


def dump(rank: Rank, directory: str) -> Path:
    """Write `rank<r>.bin` and `rank<r>.json`: {version, regions: [{tensor, dtype, box, offset, nbytes}]}.

    `box` is [[start, stop], …] per dim of the checkpoint tensor; the bytes at `offset` are its elements, row-major.
    """
    if rank.layout is None or rank.memory is None or rank.base is None:
        raise StateError("nothing has been published yet, so there is no layout to write out")
    shapes = {spec.name: spec for spec in rank.base.tensors}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    with (folder / f"rank{rank.number}.bin").open("wb") as file:
        for region in rank.layout.regions:
            spec = shapes[region.tensor]
            data = rank.memory.elements(region, spec.dtype).tobytes()
            entries.append(
                {
                    "tensor": spec.name,
                    "dtype": spec.dtype,
                    "box": box(region, spec.shape),
                    "offset": file.tell(),
                    "nbytes": len(data),
                }
            )
            file.write(data)
    index = folder / f"rank{rank.number}.json"
    index.write_text(json.dumps({"version": rank.version, "regions": entries}))
    return index


def box(region: Region, shape: tuple[int, ...]) -> list[list[int]]:
    """The region as [start, stop) per dim of the checkpoint tensor.

    Raises:
        UnsupportedLayout: it is not one box of that shape.
    """
    source = region.source
    first = [int(i) for i in np.unravel_index(source.offset, shape)]
    last = [int(i) for i in np.unravel_index(source.end - 1, shape)]
    bounds = [[a, b + 1] for a, b in zip(first, last, strict=True)]
    if np.prod([b - a for a, b in bounds], dtype=np.int64) != region.numel:
        raise UnsupportedLayout(f"{region.tensor!r}: the part held here is not one box of shape {shape}")
    return bounds
