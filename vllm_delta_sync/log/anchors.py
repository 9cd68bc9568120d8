"""Full checkpoints inside a run: writing their files with digests, and fetching them verified.

Does not read tensors: an anchor is the files of an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_delta_sync.errors import ConfigError, DigestMismatch
from vllm_delta_sync.log import names
from vllm_delta_sync.store import Content, Store
from vllm_delta_sync.wire.keys import check_key
from vllm_delta_sync.wire.manifest import AnchorFile, AnchorRef

PIECE_BYTES = 64 << 20  # fetched, hashed and written at a time


def keys(version: int, files: Sequence[Path]) -> list[str]:
    """The keys of a checkpoint's files under the anchor prefix of a version; ConfigError for a name no key allows."""
    found = []
    for path in files:
        try:
            found.append(check_key(f"{names.anchor(version)}/{path.name}"))
        except ValueError as error:
            raise ConfigError(f"{path} cannot be part of an anchor: {error}; rename it or leave it out") from None
    return found


def write(store: Store, version: int, files: Sequence[Path]) -> AnchorRef:
    """Put the files of a checkpoint under their `keys`, all of which are checked before the first is written."""
    checked = zip(keys(version, files), files, strict=True)
    return AnchorRef(prefix=names.anchor(version), files=tuple(write_file(store, key, path) for key, path in checked))


def write_file(store: Store, key: str, path: Path) -> AnchorFile:
    """Put one file under a key that nothing has."""
    with path.open("rb") as file:
        size = path.stat().st_size
        # Mapped, so that a file of many gigabytes is hashed and written without being held in memory.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
        digest = hashlib.sha256(data).hexdigest()
        info = store.put(key, data)
    return AnchorFile(key=key, size=size, sha256=digest, content=info.content)


def fetch(store: Store, anchor: AnchorRef, directory: Path) -> None:
    """Write the anchor's files into a directory; raises DigestMismatch when one is not what the manifest states."""
    for ref in anchor.files:
        with (directory / ref.key.removeprefix(anchor.prefix + "/")).open("wb") as file:
            for piece in pieces(store, ref):
                file.write(piece)


def pieces(store: Store, ref: AnchorFile) -> Iterator[bytes]:
    """One file of an anchor, piece by piece; raises DigestMismatch at its end unless it is what the manifest states."""
    digest, at = hashlib.sha256(), 0
    content = None if ref.content is None else Content(ref.content, ref.size)
    while at < ref.size:
        piece = store.get(ref.key, at, min(at + PIECE_BYTES, ref.size), content=content)
        if not piece:
            break
        digest.update(piece)
        at += len(piece)
        yield piece
    if at != ref.size or digest.hexdigest() != ref.sha256:
        raise DigestMismatch(
            f"{store.uri}/{ref.key}: not the {ref.size} bytes its manifest states; damaged or truncated"
        )
