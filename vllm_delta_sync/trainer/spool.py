"""A model's configuration and tokenizer, kept for the checkpoints that come later: in a temporary file, not in memory.

Does not read the directory that they came from again: it may have changed, or be gone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping

from vllm_delta_sync.errors import ConfigError


class SpooledFiles(Mapping[str, bytes]):
    """Files by name, as they were when this was made. Read it from any thread; the temporary file ends with it.

    Raises ConfigError when there is no room for them among the temporary files.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._places: dict[str, tuple[int, int]] = {}  # name → (start, size) in the file
        end = 0
        try:
            self._file = tempfile.TemporaryFile(prefix="vllm-delta-sync-")  # noqa: SIM115 – it lives as long as this
            for name, data in files.items():
                self._file.write(data)
                self._places[name] = end, len(data)
                end += len(data)
            self._file.flush()  # all of it, or an error: without a buffer, a write may take a part and say nothing
        except OSError as error:
            raise ConfigError(
                f"the model's configuration and tokenizer ({sum(map(len, files.values()))} bytes) are to be kept in a "
                f"temporary file: {error.strerror}; make room, or name a directory that has it in TMPDIR"
            ) from error

    def __getitem__(self, name: str) -> bytes:
        start, size = self._places[name]
        return os.pread(self._file.fileno(), size, start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
