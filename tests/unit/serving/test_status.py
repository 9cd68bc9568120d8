"""The status file lies where nobody else can put one."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.serving.status import StatusFile


@pytest.mark.parametrize("found", ["a file", "a link to nowhere", "a link to a folder", "a folder open to others"])
def test_a_folder_that_somebody_else_may_have_made_is_refused_by_name(found: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "status", tmp_path / "elsewhere"
    if found == "a file":
        folder.touch()
    elif found == "a folder open to others":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.symlink_to(elsewhere)
        if found == "a link to a folder":
            elsewhere.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        StatusFile(folder / "engine-0.json", dict)
    assert not (elsewhere / "engine-0.json").exists()
