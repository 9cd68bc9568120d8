"""What the README shows works as it stands: the trainer's lines, a server's settings, versions, targets, files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from vllm_delta_sync import DeltaLog, config

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown(language: str) -> str:
    """The one block of the README in that language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(block)


def test_the_trainers_three_lines_publish_a_version(tmp_path: Path) -> None:
    lines = re.sub(r'open\("[^"]*"', f'open("{tmp_path.as_uri()}"', shown("python"))
    model = torch.nn.Linear(8, 8)
    exec(f"from vllm_delta_sync import Publisher\n{lines}", {"model": model, "step": 7})
    tip = DeltaLog.open(tmp_path).tip()
    assert (tip.version, tip.step) == (1, 7)


def test_the_servers_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DELTA_SYNC_CONFIG", raising=False)
    found = yaml.safe_load(shown("yaml"))
    settings = config.load(found["additional-config"])
    assert found["worker-extension-cls"] == "vllm_delta_sync.WorkerExtension"
    assert settings.store.uri == "hf://buckets/me/runs/run-42"


def test_the_versions_of_vllm_are_those_that_are_asked_for() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    least, beyond = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", wanted[0]).groups()  # type: ignore[union-attr]
    assert f"vLLM 0.{least} … 0.{int(beyond) - 1}" in README


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_targets_and_files_that_documents_name_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = re.findall(r"`((?:configs|csrc|docs|tests|vllm_delta_sync)/[\w./-]+)`", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    assert [file for file in files if not (ROOT / file).exists()] == []
