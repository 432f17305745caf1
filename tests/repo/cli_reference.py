"""The sections of docs/reference/cli.md, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from barchan.cli.main import COMMANDS, barchan

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
LAYERS = "[Look into layers](../how-to/layers.md)"
SEE = {
    "env build": "[Build an environment from a Dockerfile](../how-to/build-an-environment.md)",
    "env import": "[Import an environment](../how-to/import-an-environment.md)",
    "layer ls": LAYERS,
    "layer cat": LAYERS,
    "layer diff": LAYERS,
    "layer export": LAYERS,
    "layer collapse": LAYERS,
    "create": "[Make many sandboxes](../how-to/many-sandboxes.md)",
    "layer pack": "[Pack a sandbox](../how-to/pack-a-sandbox.md)",
    "shell": "[Shells and terminals](../how-to/shells-and-terminals.md)",
}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by the words that call it, subcommands too."""
    context = click.Context(barchan)
    for name in COMMANDS:
        command = barchan.get_command(context, name)
        assert command
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", child) for sub, child in command.commands.items())
        else:
            yield name, command


def with_sections(page: str) -> str:
    """The page with its sections as the commands are; what stands before the first one stays."""
    head = page[: page.index("\n### barchan ") + 1]
    return head + "\n".join(section(name, command) for name, command in commands())


def section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"barchan {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    text = re.sub(r"(?<![\n ])\n(?=[^\n ])", " ", _unindented(command.help or ""))
    see = f" See {SEE[name]}." if name in SEE else ""
    options = [row(option, context) for option in command.params if isinstance(option, click.Option)]
    rows = "".join(line for line in options if line)
    table = f"\n| option | |\n|---|---|\n{rows}" if rows else ""
    return f"### barchan {name}\n\n`barchan {name} {usage}`\n\n{text}{see}\n{table}"


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def row(option: click.Option, context: click.Context) -> str:
    """Of the table; nothing for what every command has, and for what is hidden."""
    if option.hidden or option.name == "json":
        return ""
    made = option.get_help_record(context)
    assert made is not None
    names = ", ".join(f"`{name}`" for name in made[0].split(", "))
    return "| {} | {} |\n".format(*(cell.replace("|", "\\|") for cell in (names, made[1])))
