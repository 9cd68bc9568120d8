"""Writing the model at a version as an ordinary Hugging Face checkpoint.

Does not write into a directory that already holds something.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.log.materialize import reconstructed
from vllm_delta_sync.log.progress import Progress, silent
from vllm_delta_sync.log.reader import DeltaLog
from vllm_delta_sync.wire.checkpoint import config_files, open_checkpoint, sync_directory, write_checkpoint


def export(
    log: DeltaLog, version: int, out: Path, base: str | os.PathLike[str] | None = None, *, progress: Progress = silent
) -> list[Path]:
    """Write version `version` to the directory `out`, with configuration and tokenizer of the base, or of
    the anchor that it began with; returns the files.

    Tensors that the log does not publish are carried over from there unchanged. `out` appears whole or not at all.

    Args:
        base: directory of the base checkpoint, or None as for `materialize`.

    Raises ConfigError when `out` exists and is not an empty directory, and whatever `materialize` raises.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} already exists and is not an empty directory; name another place to export to")
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}.writing")  # no other export's, and none's leftovers
    with reconstructed(log, version, base, progress=progress) as (replica, beginning):
        directory = beginning if base is None else Path(base)
        assert isinstance(directory, Path), "it was given as a directory or found as one"
        source = open_checkpoint(directory)
        rest = [source[name] for name in source if name not in replica.tensors]
        tensors = sorted([*replica.tensors.values(), *rest], key=lambda tensor: tensor[0].name)
        try:
            progress("writing the checkpoint", 0, 1)
            written = write_checkpoint(partial, tensors, config_files(directory))
            os.replace(partial, out)
            sync_directory(out.parent)
        except OSError as error:
            raise ConfigError(
                f"cannot write {out}: {error.strerror}; choose a place that is writable and free"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    progress("writing the checkpoint", 1, 1)
    return [out / path.name for path in written]
