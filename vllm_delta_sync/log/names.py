"""The keys of docs/protocol.md, *Objects*.

Does not read or write them.
"""

from __future__ import annotations

RUN = "RUN"
LATEST = "LATEST"


def version_prefix(version: int) -> str:
    """Where a version's manifest and shards are."""
    return f"versions/{version:020d}"


def fold_prefix(source: int, to: int) -> str:
    """Where a fold's shards are."""
    return f"folds/{source:020d}-{to:020d}"


def anchor(version: int) -> str:
    """Prefix of the full checkpoint of a version."""
    return f"anchors/{version:020d}"


def later_anchor(version: int, attempt: str) -> str:
    """Prefix of the full checkpoint of a version after the base, of which an earlier attempt may have left files."""
    return f"{anchor(version)}/{attempt}"


def manifest(version: int, attempt: str) -> str:
    """Key of a manifest; `attempt` is a fresh uuid for every try to write the version."""
    return f"{version_prefix(version)}/{attempt}.manifest.json"


def states(version: int, attempt: str) -> str:
    """Key of an anchor's table of all tensors' states."""
    return f"{anchor(version)}/{attempt}.table.zst"


def catalog(sequence: int, attempt: str) -> str:
    """Key of the catalog that LATEST first names at `sequence`, or soon after it."""
    return f"catalogs/{sequence:020d}-{attempt}.json"


def shards(prefix: str, attempt: str, total: int) -> list[str]:
    """Keys of the `total` shards of a version or a fold, whose prefix it is."""
    return [f"{prefix}/{attempt}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
