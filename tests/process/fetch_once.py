"""A reader process on a node's cache: makes itself known, waits for a line on stdin, fetches the tip, says what came,
and stays until another line.

Arguments: BUCKET CACHE TENSOR,TENSOR,… STALL. With STALL > 0, it stops for ever before it takes that many bytes or more
from the store at once.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from counting_store import CountingStore

from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.store import Content


class StallingStore(CountingStore):
    """Never answers a request for `least` bytes or more."""

    least = 1 << 62

    def get(self, key: str, start: int = 0, end: int | None = None, *, content: Content | None = None) -> bytes:
        if end is not None and end - start >= self.least:
            print("stalled", flush=True)
            time.sleep(3600)
        return super().get(key, start, end, content=content)


def main() -> None:
    bucket, cache, names, stall = sys.argv[1:]
    log = DeltaLog.open(bucket)
    store = StallingStore(log.store)
    tip = log.tip()
    needs = Needs({name: ((0, 1 << 30),) for name in names.split(",")})
    fetcher = Fetcher(store, NodeCache(Path(cache), 1 << 20), needs)
    print("ready", flush=True)
    sys.stdin.readline()
    store.least = int(stall) or store.least
    table = fetcher.table(tip)
    blocks = {str(block): hashlib.sha256(data).hexdigest() for block, data in fetcher.blocks(tip, table)}
    counts = {"fetched": fetcher.fetched_bytes, "cached": fetcher.cached_bytes, "needed": fetcher.needed_bytes}
    failure = fetcher.take_cache_failure()
    print(json.dumps({"blocks": blocks, "failure": str(failure) if failure else None, **counts}), flush=True)
    sys.stdin.readline()  # who has left needs nothing any more


if __name__ == "__main__":
    main()
