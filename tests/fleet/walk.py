"""Publishes a synthetic walk, one version each so many seconds, with folds: `walk.py URI VERSIONS SECONDS`.

Holds no assertions. Prints `begun` once version 0 is there, and at the end the bytes of the largest version.
"""

from __future__ import annotations

import sys
import time

import torch

from vllm_delta_sync.bench.warm_walk import WarmWalk
from vllm_delta_sync.trainer import Publisher

ELEMENTS = 4_000_000


def state(walk: WarmWalk) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(bits).view(torch.bfloat16).reshape(spec.shape)
        for name, (spec, bits) in walk.model.items()
    }


def main() -> None:
    uri, versions, interval = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    walk = WarmWalk(ELEMENTS)
    with Publisher.open(uri, state(walk), anchor="never", threads=1) as publisher:
        print("begun", flush=True)
        due, publications = time.monotonic(), []
        for _ in range(versions):
            walk.step()
            due += interval
            time.sleep(max(0.0, due - time.monotonic()))
            publications.append(publisher.publish(state(walk)))
        publisher.wait()
        print(max(publication.result().bytes for publication in publications), flush=True)


if __name__ == "__main__":
    main()
