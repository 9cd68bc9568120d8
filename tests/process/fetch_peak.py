"""Fetches and decodes all blocks of a log's tip and prints by how many bytes the process grew at its peak.

Arguments: BUCKET CACHE, an empty CACHE for none.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_delta_sync.bench import resident
from vllm_delta_sync.log import DeltaLog
from vllm_delta_sync.log.cache import NodeCache
from vllm_delta_sync.log.fetcher import Fetcher
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.wire.codecs import decode_block


def main() -> None:
    bucket, cache = sys.argv[1:]
    log = DeltaLog.open(bucket)
    tip = log.tip()
    needs = Needs({spec.name: ((0, spec.numel),) for spec in log.table(tip).tensors})
    fetcher = Fetcher(log.store, NodeCache(Path(cache), 1 << 30) if cache else None, needs)
    table = fetcher.table(tip)
    before = resident.reset_peak()
    for block, data in fetcher.blocks(tip, table):
        decode_block(block, data)
    assert fetcher.take_cache_failure() is None
    print(resident.peak() - before)


if __name__ == "__main__":
    main()
