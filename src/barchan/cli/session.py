"""What all commands share: the options for output and connection, and how an error is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from barchan.cli.text import plain
from barchan.config import DEFAULT_DATA
from barchan.errors import BarchanError, InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Session:
    """Of one invocation: whether its output is for programs."""

    json: bool = False

    def emit(self, value: Any) -> None:
        """One JSON document, on a line of its own."""
        sys.stdout.buffer.write(to_json(value) + b"\n")
        sys.stdout.buffer.flush()

    def report(self, error: BarchanError) -> None:
        """Show an error on stderr."""
        line = to_json(error.body()).decode() if self.json else describe(error)
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def to_json(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value, enc_hook=str)


def describe(error: BarchanError) -> str:
    return f"error: {plain(str(error))} [{error.code}]"


def usage_error(error: click.UsageError) -> InvalidRequest:
    """What click refused, in our tree."""
    where = f"{error.ctx.command_path} --help" if error.ctx else "barchan --help"
    param = getattr(error, "param", None)
    return InvalidRequest(error.format_message(), field=(param.name if param else "") or "", hint=f"see {where}")


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).json = True


def json_option(command: F) -> F:
    return click.option(
        "--json",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_json,
        help="JSON on stdout, errors as JSON on stderr.",
    )(command)


def data_option(command: F) -> F:
    return click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_DATA,
        show_default=True,
        help="Data directory of the server on this host.",
    )(command)
