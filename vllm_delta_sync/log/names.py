"""The keys of docs/protocol.md, *Objects*.

Does not read or write them.
"""

from __future__ import annotations

RUN = "RUN"
LATEST = "LATEST"


def version_prefix(version: int) -> str:
    """Where a version's manifest, table and shards are."""
    return f"versions/{version:020d}"


def manifest(version: int, attempt: str) -> str:
    """Key of a manifest; `attempt` is a fresh uuid for every try to write the version."""
    return f"{version_prefix(version)}/{attempt}.manifest.json"


def table(version: int, attempt: str) -> str:
    """Key of a table."""
    return f"{version_prefix(version)}/{attempt}.table.zst"


def shard(version: int, attempt: str, number: int, total: int) -> str:
    """Key of shard `number` (from 1) of `total`."""
    return f"{version_prefix(version)}/{attempt}-{number:05d}-of-{total:05d}.safetensors"


def anchor(version: int) -> str:
    """Prefix of the full checkpoint of a version."""
    return f"anchors/{version:020d}"
