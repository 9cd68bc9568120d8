"""The table of commands and the entry point.

Does not do any command's work, and imports none of them before it is called by name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
import typer.core

from vllm_delta_sync.errors import DeltaSyncError

# name → (module, function or sub-app in it, what `--help` says)
COMMANDS = {
    "inspect": (
        "vllm_delta_sync.cli.inspect",
        "inspect",
        "Show a log's versions, or what a shard, table or manifest holds.",
    ),
    "log": ("vllm_delta_sync.cli.log", "log", "Show the versions of a run, the newest first."),
    "runs": ("vllm_delta_sync.cli.runs", "runs", "Show the runs of a bucket."),
    "watch": ("vllm_delta_sync.cli.watch", "watch", "Print each version as it comes, fetched and verified."),
    "pin": ("vllm_delta_sync.cli.pin", "pin", "Make every follower go to a version and stay there."),
    "unpin": ("vllm_delta_sync.cli.pin", "unpin", "Let followers go to the tip again."),
    "gc": ("vllm_delta_sync.cli.gc", "gc", "Show, or delete, what no reader needs any more."),
    "verify": ("vllm_delta_sync.cli.verify", "verify", "Check every digest, block and state root of a log."),
    "export": ("vllm_delta_sync.cli.export", "export", "Write a version as an ordinary Hugging Face checkpoint."),
    "fold": ("vllm_delta_sync.cli.fold", "fold", "Fold many versions into one object for followers far behind."),
    "anchor": ("vllm_delta_sync.cli.anchor", "anchor", "Write a version into the bucket as a full checkpoint."),
    "bench": ("vllm_delta_sync.cli.bench", "app", "Measure this machine."),
    "demo": ("vllm_delta_sync.cli.demo", "demo", "Train a small model and watch a server follow it."),
}


class _LazyGroup(typer.core.TyperGroup):
    """Lists commands from the table, and imports one when it is to be run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return typer.core.TyperCommand(cmd_name, help=COMMANDS[cmd_name][2])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)) if command is not None else None, rest


def _load(name: str) -> Any:
    module, attribute, _ = COMMANDS[name]
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(found)
    return typer.main.get_command(app)


app = typer.Typer(
    cls=_LazyGroup,
    name="vllm-delta-sync",
    help="Keep running vLLM servers in step with a trainer by sending only the weights that changed.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help needs none of rich, whose Markdown alone takes longer to import than all else
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    pass


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 refused or failed, 2 wrong usage."""
    try:
        app()
    except DeltaSyncError as error:
        from rich.console import Console

        from vllm_delta_sync.cli.output import printable

        text = printable(f"error: {error}")
        Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
        sys.exit(1)
