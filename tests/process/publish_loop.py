"""Trainer processes to be killed: each resumes the run in a bucket, then trains and publishes until it is stopped.

A server, so that torch is imported once: for every line on stdin it forks a trainer that makes STEPS steps and kills
itself (SIGKILL) before its WRITES-th write to the store, or never if WRITES is 0. FOLDS is 1 if it writes folds and
anchors behind its versions, else 0. Prints the trainer's pid, then `ended STATUS`. The trainer appends
`version digest-of-the-state` to the ledger before it publishes a version.

Lines: `BUCKET LEDGER STEPS WRITES FOLDS`, paths without spaces.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from tiny_training import Training, TroubledStore, digest

from vllm_delta_sync.store import open_store
from vllm_delta_sync.trainer import Publisher


def train(bucket: str, ledger: Path, steps: int, writes: int, folds: bool) -> None:
    store = TroubledStore(open_store(bucket))

    def die(key: str) -> bool:
        if len(store.puts) == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    store.fail = die
    training = Training()
    torch.manual_seed(os.getpid())  # no two trainers see the same data, so every version differs from the one before
    behind: dict[str, None] = {} if folds else {"folds": None, "anchors": None}
    publisher = Publisher.open(store, training.model, resume=True, threads=1, **behind)
    with publisher, ledger.open("a") as lines:
        for _ in range(steps):
            training.step()
            print(publisher.version + 1, digest(training.state()), file=lines, flush=True)
            publisher.publish(training.model)


def main() -> None:
    torch.set_num_threads(1)  # no pool of threads that a fork would leave behind
    Training().step()  # loads what torch loads late
    for line in sys.stdin:
        bucket, ledger, steps, writes, folds = line.split()
        pid = os.fork()
        if pid == 0:
            train(bucket, Path(ledger), int(steps), int(writes), folds == "1")
            os._exit(0)
        print(pid, flush=True)
        print("ended", os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
