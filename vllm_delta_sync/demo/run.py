"""The demo from start to end: serve, stream, train, publish, and then check everything that is claimed.

Does not hold the parts (`checkpoint`, `train`, `load`, `session`, `check`) or the command line.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from vllm_delta_sync.demo import check, checkpoint
from vllm_delta_sync.demo.load import Load, Traffic
from vllm_delta_sync.demo.session import Commit, Session
from vllm_delta_sync.demo.train import Trainer
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.export import export
from vllm_delta_sync.store import open_store
from vllm_delta_sync.trainer import Publication, Publisher

STREAMS = 4
QUIET_STEPS = 2
"""After every other published step come this many that are not published. Token gaps are compared between the two: with
the order p q q p, what drifts on the machine meanwhile falls on both alike."""

BATCH = 1  # sequences a step
ROLLOUT_S = 5.0
"""After each step the server has the machine to itself, as when the next batch of an on-policy run is generated."""

MAX_BYTES_PER_CHANGE = 1.0
GREEDY_TOKENS = 48
GREEDY_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "A function in Python is defined with",
    "The three primary colours are",
    "Once upon a time, in a harbour by the sea,",
    "To measure the height of a tree without climbing it,",
)


@dataclass(frozen=True)
class Result:
    """What the demo found; the fields of its JSON line."""

    model: str
    versions: int  # published and served
    bit_identical: bool  # live weights of every rank and the trainer's state at the last version, by hash and by bytes
    greedy_equal: bool  # completions of this server and of a fresh one on the exported weights
    requests_failed: int  # refused, broken off or aborted
    changed_pct: float  # of all elements, per version, median
    bytes_per_change: float  # shards and tables over changed elements, all versions
    commit_ms_p50: float
    commit_ms_max: float
    token_gap_p99_ms: float  # between two tokens of a stream, while publishing
    token_gap_p99_nosync_ms: float  # the same streams and training, without publishing
    tp: int
    store: str  # scheme of the bucket's URI

    @property
    def wrong(self) -> list[str]:
        """What did not come out as claimed, one sentence each."""
        claims = {
            "the live weights are not the trainer's": not self.bit_identical,
            "greedy completions differ from those of a fresh server": not self.greedy_equal,
            f"{self.requests_failed} requests failed": self.requests_failed > 0,
            f"{self.bytes_per_change} bytes a change": self.bytes_per_change > MAX_BYTES_PER_CHANGE,
        }
        return [claim for claim, broken in claims.items() if broken]


@dataclass(frozen=True)
class _Run:
    """What training beside the live server left."""

    publications: list[Publication]
    commits: list[Commit]
    traffic: Traffic
    quiet: list[tuple[float, float]]  # first and last moments, time.monotonic(), of steps without publishing
    synced: list[tuple[float, float]]  # and with it


def run(cache: Path, versions: int, tensor_parallel: int, bucket: str | None, keep: bool, console: Console) -> Result:
    """Run the demo.

    Args:
        cache: folder for models, which stay, and for the bucket, logs and dumps, which go at the end unless `keep`.
        versions: to publish, at least 6.
        tensor_parallel: 1 or 2 ranks.
        bucket: URI of a store in which this run gets a folder, which goes at the end too; None takes one in `cache`.
        keep: leave everything in place.
        console: for people.
    """
    work = cache / "demo"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    console.print("building the model (ten seconds, the first time)")
    model = checkpoint.smollm2(cache) if tensor_parallel == 1 else checkpoint.tp_twin(cache)
    place = own_place(bucket or (work / "bucket").as_uri())
    session = Session(work, model, place, tensor_parallel)
    console.print(f"starting vllm serve with {tensor_parallel} rank(s) (up to a minute); log: {work / 'server.log'}")
    with session.server:
        with Load(session.server.url, STREAMS, work / "traffic.json") as load:
            torch.set_num_threads(1)
            trainer = Trainer(model, batch=BATCH)
            done = _train_and_publish(trainer, model, session, place, versions, load, console)
        console.print("\nchecking the live weights: by state hash, then byte for byte")
        served = [session.server.complete(prompt, GREEDY_TOKENS) for prompt in GREEDY_PROMPTS]
        audit = session.audit()
        session.dump(work / "live")
    exported = work / "exported"
    export(DeltaLog.open(place), versions, exported, model)
    wrong = check.differing_hashes(audit["tensor_hashes"] or (), trainer.state())
    wrong += check.differing_bytes(work / "live", tensor_parallel, exported / checkpoint.WEIGHTS)
    wrong += check.differing_tensors(exported / checkpoint.WEIGHTS, trainer.state())
    console.print("starting a fresh server on the exported weights, to compare greedy completions (up to a minute)")
    fresh = _fresh_completions(work, exported, tensor_parallel)
    for name in sorted(set(wrong)):
        console.print(f"[red]not bit-identical: {name}")
    for failure in done.traffic.failures:
        console.print(f"[red]{failure}", highlight=False)
    at_last_version = audit["version"] == versions and not audit["wrong"]
    result = _result(done, model.name, tensor_parallel, place, not wrong and at_last_version, served == fresh)
    if not keep:
        store = open_store(place)
        store.delete(store.list())
        shutil.rmtree(work)
    return result


def own_place(bucket: str) -> str:
    """The URI of a new folder in a bucket, which no other run of the demo uses."""
    return f"{bucket.rstrip('/')}/demo-{uuid.uuid4().hex[:8]}"


def _train_and_publish(
    trainer: Trainer, model: Path, session: Session, bucket: str, versions: int, load: Load, console: Console
) -> _Run:
    publications: list[Publication] = []
    published_at: dict[int, float] = {}
    quiet, synced = [], []
    # No folds: nobody joins this run late, and two cores have enough to do.
    with Publisher.open(bucket, base=model, threads=1, folds=None, anchors=None) as publisher:
        session.wait_until_served(0)
        console.print(f"training beside {STREAMS} streams; of every four steps two are published")
        trainer.step()  # the first allocates the optimiser's state
        with Live(
            get_renderable=lambda: _table(publications, published_at, session.commits()),
            console=console,
            refresh_per_second=2,
        ):
            for version in range(1, versions + 1):
                begin = time.monotonic()
                trainer.step()
                published_at[version] = time.time()
                publications.append(publisher.publish(trainer.model, step=trainer.steps))
                session.wait_until_served(version)  # on-policy: the next batch comes from these weights
                time.sleep(ROLLOUT_S)
                synced.append((begin, time.monotonic()))
                if version % 2:
                    for _ in range(QUIET_STEPS):
                        trainer.step()
                        time.sleep(ROLLOUT_S)
                    quiet.append((synced[-1][1], time.monotonic()))
    return _Run(publications, session.commits(), load.stop(), quiet, synced)


def _fresh_completions(work: Path, exported: Path, tensor_parallel: int) -> list[str]:
    # With the extension and an empty bucket: on CPU the extension chooses the matrix kernels, and only equal kernels
    # can be expected to round equally.
    fresh = Session(work / "fresh", exported, (work / "nothing").as_uri(), tensor_parallel)
    with fresh.server as server:
        return [server.complete(prompt, GREEDY_TOKENS) for prompt in GREEDY_PROMPTS]


def _table(publications: list[Publication], published_at: dict[int, float], commits: list[Commit]) -> Table:
    table = Table("step", "version", "changed", "size", "publish", "stage", "commit", "served after")
    by_version = {commit.version: commit for commit in commits}
    for publication in list(publications):
        commit = by_version.get(publication.version)
        table.add_row(
            str(publication.step),
            str(publication.version),
            f"{100 * publication.changed / publication.elements:.3f} %",
            f"{publication.result().bytes / 1e6:.2f} MB" if publication.durable else "…",
            f"{publication.waited_s + publication.diff_s:.2f} s",
            f"{1e3 * commit.stage_s:.0f} ms" if commit else "…",
            f"{1e3 * commit.commit_s:.1f} ms" if commit else "…",
            f"{commit.at - published_at[publication.version]:.1f} s" if commit else "…",
        )
    return table


def _result(
    done: _Run, model: str, tensor_parallel: int, place: str, bit_identical: bool, greedy_equal: bool
) -> Result:
    changed = [publication.changed for publication in done.publications]
    pauses = [1e3 * commit.commit_s for commit in done.commits]
    shares = [100 * publication.changed / publication.elements for publication in done.publications]
    written = sum(publication.result().bytes for publication in done.publications)
    return Result(
        model=model,
        versions=len({commit.version for commit in done.commits} & {item.version for item in done.publications}),
        bit_identical=bit_identical,
        greedy_equal=greedy_equal,
        requests_failed=len(done.traffic.failures),
        changed_pct=round(statistics.median(shares), 4),
        bytes_per_change=math.ceil(1e3 * written / sum(changed)) / 1e3,
        commit_ms_p50=round(statistics.median(pauses), 2),
        commit_ms_max=round(max(pauses), 2),
        token_gap_p99_ms=round(done.traffic.gap_percentile(99, done.synced), 1),
        token_gap_p99_nosync_ms=round(done.traffic.gap_percentile(99, done.quiet), 1),
        tp=tensor_parallel,
        store=place.partition("://")[0],
    )
