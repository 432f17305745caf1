"""Where the API is, from arguments and environment. Pure but for the environment given to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from barchan.config import DEFAULT_DATA, Layout
from barchan.errors import InvalidRequest


class Address(NamedTuple):
    base: str
    """http(s)://host:port without a slash at the end; the host means nothing on a unix socket."""
    unix: str = ""
    token: str = ""

    def __str__(self) -> str:
        return f"unix:{self.unix}" if self.unix else self.base


def find_address(
    url: str | None, token: str | None, data: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> Address:
    """An explicit argument first, then BARCHAN_URL and BARCHAN_TOKEN, then the socket of the default data directory."""
    token = token if token is not None else environ.get("BARCHAN_TOKEN", "")
    if url is None and data is None:
        url = environ.get("BARCHAN_URL") or None
    if url is None:
        return _socket(os.fspath(Layout(Path(data or DEFAULT_DATA)).api_socket), token)
    if url.startswith("unix:"):
        return _socket(url.removeprefix("unix:").removeprefix("//"), token)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/") or parts.query:
        raise InvalidRequest(
            f"url: {url!r} is not an address", field="url", hint="https://host:port, http://host:port or unix:/path"
        )
    return Address(f"{parts.scheme}://{parts.netloc}", "", token)


def _socket(path: str, token: str) -> Address:
    if not path.startswith("/"):
        raise InvalidRequest(f"url: {path!r} is not an absolute path", field="url")
    return Address("http://barchan", path, token)
