"""Where the API is, from arguments and environment. Pure but for the environment given to it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from barchan.config import DEFAULT_DATA, Layout, default_data
from barchan.errors import InvalidRequest

_MOST_SOCKET = 107
"""Bytes of a unix socket's path."""


class Address(NamedTuple):
    base: str
    """http(s)://host:port without a slash at the end; the host means nothing on a unix socket."""
    unix: str = ""
    token: str = ""

    @property
    def start(self) -> str:
        """The command that starts a server there; empty when that is no matter of this host or not known."""
        data = Path(self.unix).parents[1] if self.unix.count("/") > 2 else Path()
        if os.fspath(Layout(data).api_socket) != self.unix:
            return ""
        return "barchan up" if data == DEFAULT_DATA else f"barchan up --data {shlex.quote(os.fspath(data))}"

    def __str__(self) -> str:
        return f"unix:{self.unix}" if self.unix else self.base


def find_address(
    url: str | None, token: str | None, data: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> Address:
    """An explicit argument first, then BARCHAN_URL and BARCHAN_TOKEN, then the socket below BARCHAN_DATA or its default.

    Raises `InvalidRequest`.
    """
    for value, field, kinds in ((url, "url", str), (token, "token", str), (data, "data", (str, os.PathLike))):
        if value is not None and not isinstance(value, kinds):
            raise InvalidRequest(f"{field}: {type(value).__name__} is no {field}", field=field, hint="give a str")
    # A token often comes from a file, with its line end.
    token = (token if token is not None else environ.get("BARCHAN_TOKEN", "")).strip()
    if not token.isascii() or not token.isprintable():
        raise InvalidRequest("token: has characters that no token has", field="token", hint="it is in DATA/token")
    if url is None and data is None:
        url = environ.get("BARCHAN_URL") or None
    if url is None:
        return _socket(os.fspath(Layout(Path(data or default_data(environ))).api_socket), token)
    if url.startswith("unix:"):
        return _socket(url.removeprefix("unix:").removeprefix("//"), token)
    try:
        base = _base(url)
    except ValueError as error:
        raise InvalidRequest(
            f"url: {url!r} is not an address", field="url", hint="https://host:port, http://host:port or unix:/path"
        ) from error
    return Address(base, "", token)


def _base(url: str) -> str:
    """Raises `ValueError`."""
    parts = urlsplit(url)
    known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    if not known or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("not scheme, host and port alone")
    return f"{parts.scheme}://{parts.netloc}"


def _socket(path: str, token: str) -> Address:
    if not path.startswith("/"):
        raise InvalidRequest(f"url: {path!r} is not an absolute path", field="url")
    if len(os.fsencode(path)) > _MOST_SOCKET or "\0" in path:
        raise InvalidRequest(
            f"url: {path!r} is too long for a socket", field="url", hint=f"at most {_MOST_SOCKET} bytes"
        )
    return Address("http://barchan", path, token)
