"""What all commands share: the options for output and connection, and how an error is shown."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from barchan.cli.text import escaped, plain
from barchan.config import DEFAULT_DATA
from barchan.errors import BarchanError, FeatureMissing, FileFailure, InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])
_LOCAL_COMMAND = re.compile(r"`(barchan (?:up|down|doctor|env|ls)\b[^`]*)`")


@dataclass
class Session:
    """Of one invocation: whether its output is for programs, and the data directory if it is not the default one."""

    json: bool = False
    data: Path | None = None

    def emit(self, value: Any) -> None:
        """One JSON document, on a line of its own."""
        sys.stdout.buffer.write(to_json(value) + b"\n")
        sys.stdout.buffer.flush()

    def report(self, error: BarchanError) -> None:
        """Show an error on stderr."""
        error.hint = addressed(error.hint, self.data)
        self.note(to_json(error.body()).decode() if self.json else describe(error))

    def note(self, line: str) -> None:
        """A line on stderr. When that fails there is nobody to tell."""
        with suppress(OSError, FileFailure):
            print(line, file=sys.stderr, flush=True)


def to_json(value: Any) -> bytes:
    """Without characters that a terminal obeys or that turn its text around: they are escaped, too."""
    import msgspec

    document = msgspec.json.encode(value, enc_hook=str)
    if document.isascii() and b"\x7f" not in document:
        return document
    return escaped(document.decode()).encode()


_SAME_NAME = (
    *(
        "hostname",
        "idle_timeout",
        "lifetime",
        "user",
        "workdir",
        "env",
        "timeout",
        "output_limit",
        "tty",
        "node",
        "name",
    ),
    *("data", "delete", "listen", "tls_cert", "scratch_bytes", "log_bytes", "data_mount", "ca_file"),
    "network_prefix",
)
OPTIONS = {
    **{f"limits.{name}": f"--{name}" for name in ("memory", "cpus", "pids", "disk")},
    **{name: f"--{name.replace('_', '-')}" for name in _SAME_NAME},
    "cwd": "--workdir",
    "labels": "--label",
    "nameservers": "--nameserver",
    "network.mode": "--network",
    "network_grants": "--network-grant",
    "mounts": "--mount",
    "mounts.source": "--mount",
    "mounts.target": "--mount",
    "secrets": "--secret",
}
"""Where the value of a field comes from on a command line."""


def describe(error: BarchanError) -> str:
    return f"error: {plain(named(str(error), error.field))} [{error.code}]"


def named(text: str, field: str) -> str:
    """The text, with the option in front where the field's name is."""
    for prefix in (f"{field}: ", f"{field.partition('.')[0]}: "):
        if field in OPTIONS and text.startswith(prefix):
            return f"{OPTIONS[field]}: {text.removeprefix(prefix)}"
    return text


def addressed(hint: str, data: Path | None) -> str:
    """The hint, with the commands in it for this data directory."""
    if data is None or "--data " in hint:
        return hint
    return _LOCAL_COMMAND.sub(lambda found: f"`{found[1]} --data {shlex.quote(str(data))}`", hint)


def need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise FeatureMissing(f"{what} needs root", hint="run it as root")


ELSEWHERE = {
    "-v": "directories of the node: --mount NAME:/TARGET",
    "--volume": "directories of the node: --mount NAME:/TARGET",
    "--rm": "the sandbox of `barchan run` is removed unless --keep is given",
    "-m": "--memory",
    "--name": "a sandbox has an id and labels: --label name=NAME",
    "--env-file": "-e NAME=VALUE, repeated",
    "--privileged": "--setuid and --ptrace are what there is",
    "--net": "--network open",
    "--dns": "name servers are the node's: `barchan up --nameserver`",
    "-p": "nothing from outside reaches a sandbox yet",
    "-it": "-i -t, before the command",
}
"""Options of `docker run`, and what there is instead."""


def usage_error(error: click.UsageError) -> InvalidRequest:
    """What click refused, in our tree."""
    where = f"{error.ctx.command_path} --help" if error.ctx else "barchan --help"
    if isinstance(error, click.NoSuchOption) and error.option_name in ELSEWHERE:
        return InvalidRequest(f"No such option {error.option_name!r}.", hint=ELSEWHERE[error.option_name])
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


DATA_HELP = "Data directory of the server on this host.  [default: BARCHAN_DATA, or /var/lib/barchan]"
# Readable only for root: whoever is not must learn that, and not that the directory is a wrong value.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, readable=False, path_type=Path)


def keep_data(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Callback of every --data. What the environment says need not be said in hints."""
    if ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE and value != DEFAULT_DATA:
        ctx.ensure_object(Session).data = value
    return value


def data_option(command: F) -> F:
    return click.option(
        "--data",
        type=DIRECTORY,
        callback=keep_data,
        envvar="BARCHAN_DATA",
        default=DEFAULT_DATA,
        help=DATA_HELP,
    )(command)
