"""How commands reach the API: the socket of a server on this host, or a URL and a token."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from barchan.cli.session import DATA_HELP, DIRECTORY, keep_data
from barchan.config import Layout, default_data
from barchan.errors import FeatureMissing, InvalidRequest
from barchan.spec import Exec

if TYPE_CHECKING:
    from barchan.sdk import Client, Process, Sandbox

R = TypeVar("R")


CREATE_SECONDS = 3600.0
"""That a create may take: an image may have to be fetched first, and whoever waits sees how far that is."""


@dataclass(frozen=True)
class Where:
    """The API to talk to. What is None is the SDK's to find: BARCHAN_URL, BARCHAN_TOKEN, BARCHAN_DATA, the default."""

    data: Path | None = None
    api: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


def where_options(command: Callable[..., R]) -> Callable[..., R]:
    """Adds the options; the command gets them as one argument, `where`."""

    @functools.wraps(command)
    def gathered(*args: Any, **options: Any) -> R:
        where = Where(*(options.pop(name) for name in ("data", "api", "token_file", "ca_file")))
        return command(*args, where=where, **options)

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--ca-file", type=file, help="Certificate authority of --api, PEM."),
        click.option("--token-file", type=file, help="File with the token for --api.  [default: BARCHAN_TOKEN]"),
        click.option("--api", metavar="URL", help="A server elsewhere, https://HOST:PORT.  [default: BARCHAN_URL]"),
        click.option(
            "--data",
            type=DIRECTORY,
            callback=keep_data,
            help=DATA_HELP,
        ),
    ):
        gathered = option(gathered)
    return gathered


def served(where: Where) -> bool:
    """Whether a server is told of, or one may be running on this host: its socket is there."""
    if where.api is not None or (where.data is None and os.environ.get("BARCHAN_URL")):
        return True
    return Layout(where.data or default_data(os.environ)).api_socket.exists()


def open_client(where: Where, *, reconnect: float = 60.0) -> Client:
    """Not connected yet; use as a context manager. `reconnect`: seconds that a lost connection is waited for."""
    import ssl

    from barchan.sdk import Client

    if where.api is not None and where.data is not None:
        raise InvalidRequest("give --api or --data, not both", field="api")
    _check_reachable(where)
    token = where.token_file.read_text().strip() if where.token_file is not None else None
    data = where.data.absolute() if where.data is not None else None
    try:
        return Client(where.api, token, data=data, ca=where.ca_file, reconnect=reconnect)
    except ssl.SSLError as error:
        raise InvalidRequest(f"ca_file: {where.ca_file} holds no certificate", field="ca_file") from error


def _check_reachable(where: Where) -> None:
    """The socket's directory is closed to others than root: say that, and not that nobody serves."""
    if where.api is not None or (where.data is None and os.environ.get("BARCHAN_URL")):
        return
    socket = Layout(where.data or default_data(os.environ)).api_socket
    try:
        socket.stat()
    except PermissionError as error:
        hint = "run it as root, or give --api and a token"
        raise FeatureMissing(f"the server on this host needs root: {socket} cannot be reached", hint=hint) from error
    except OSError:
        return


async def start(sandbox: Sandbox, request: Exec) -> Process:
    """Start a command from one request value, which has no terminal."""
    return await sandbox.start(request.argv, stdin=request.stdin, **program(request))


def program(request: Exec) -> dict[str, Any]:
    """What the SDK's ways to start a command have in common, from one request value."""
    return {name: getattr(request, name) for name in ("cwd", "env", "secrets", "user", "timeout", "output_limit")}
