"""How commands reach the API: the socket of a server on this host, or a URL and a token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from barchan.cli.session import data_option
from barchan.errors import ApiUnavailable, InvalidRequest

if TYPE_CHECKING:
    from barchan.sdk import Client

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Where:
    """The API to talk to. Without `api`, the server of `data` on this host."""

    data: Path
    api: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


def where_options(command: F) -> F:
    """Adds the options; the command gets them as `where`."""

    def gathered(*args: Any, data: Path, api: str | None, token_file: Path | None, ca_file: Path | None, **rest: Any) -> Any:
        return command(*args, where=Where(data, api, token_file, ca_file), **rest)

    gathered.__doc__ = command.__doc__
    gathered.__name__ = command.__name__
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--ca-file", type=file, envvar="BARCHAN_CA_FILE", help="Certificate authority of --api, PEM."),
        click.option("--token-file", type=file, envvar="BARCHAN_TOKEN_FILE", help="File with the token for --api."),
        click.option("--api", metavar="URL", envvar="BARCHAN_API", help="A server elsewhere, https://HOST:PORT."),
        data_option,
    ):
        gathered = option(gathered)
    return gathered  # type: ignore[return-value]
