"""What the documents name exists: commands, their options, stores, causes, settings."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import typer

from vllm_delta_sync import errors
from vllm_delta_sync.cli.main import COMMANDS
from vllm_delta_sync.config import DeltaSyncConfig, store_from_uri, stores

DOCS = Path(__file__).parents[3] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()


def options(command: str) -> set[str]:
    """The long options of a command."""
    module, name, _ = COMMANDS[command]
    app = typer.Typer()
    app.command()(vars(import_module(module))[name])
    return {option for parameter in typer.main.get_command(app).params for option in parameter.opts}


CALLS = sorted(set(re.findall(r"`((?:" + "|".join(COMMANDS) + r") URI[^`]*)`", OPERATIONS)))


def test_the_commands_of_operations_are_found() -> None:
    assert {call.split()[0] for call in CALLS} >= {"log", "fold", "anchor", "pin", "unpin", "gc", "verify", "watch"}


@pytest.mark.parametrize("call", CALLS)
def test_a_command_that_operations_names_has_the_options_it_shows(call: str) -> None:
    assert set(re.findall(r"--[a-z-]+", call)) <= options(call.split()[0])


def test_options_that_operations_names_alone_are_of_some_command() -> None:
    known = {option for command in COMMANDS if command not in ("bench", "demo") for option in options(command)}
    assert set(re.findall(r"`(--[a-z-]+)", OPERATIONS)) <= known


def test_every_kind_of_store_is_in_the_table_with_a_uri_that_opens_it() -> None:
    shown = re.findall(r"^\| `(\w+://[^`]*)`", OPERATIONS, re.MULTILINE)
    kinds = {store_from_uri(uri.replace("[", "").replace("]", "").lower()).kind for uri in shown}
    assert kinds == set(stores.MODELS)


@pytest.mark.parametrize("name", ["operations.md", "serving.md"])
def test_the_causes_in_the_tables_are_those_of_errors(name: str) -> None:
    table = (DOCS / name).read_text().split("| cause |")[1]
    named = {
        cause
        for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
        for cause in re.findall(r"\w+", row)
    }
    known = {kind.cause for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "cause")}
    assert named and named <= known | {"audit"}


def test_the_settings_that_operations_names_exist() -> None:
    fields = {field for model in (DeltaSyncConfig, *stores.MODELS.values()) for field in model.model_fields}
    named = set(re.findall(r"`(\w+): ", OPERATIONS)) | {
        "store_timeout_s",
        "cache_dir",
        "cache_bytes",
        "poll_interval_s",
    }
    assert named <= fields | {"store", "run"}
