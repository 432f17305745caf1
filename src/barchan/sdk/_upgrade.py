"""From an address to a connection on which WebSocket frames may be sent. `_sync/_upgrade.py` is the same for threads.

The handshake (RFC 6455, section 4.1) is one request and one answer, so no HTTP library is loaded for it: a command line
that lives for a fraction of a second would spend most of its start on one.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable
from typing import TypeVar, cast
from urllib.parse import SplitResult, urlsplit

from barchan.errors import ProtocolError
from barchan.sdk._address import Address
from barchan.sdk._failures import refused, unreachable
from barchan.wire.transports import WebSocketLink
from barchan.wire.websocket import accept_key, new_key

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds for each step of connecting."""
MOST_HEAD = 64 << 10
END = b"\r\n\r\n"


class Opening(asyncio.Protocol):
    """What arrives: first the answer's head, kept for `head`; from `hand_on` on all of it is the link's."""

    def __init__(self) -> None:
        self._head = asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._web: WebSocketLink | None = None
        self._lost = False

    async def head(self) -> bytes:
        """Up to the empty line. Raises `OSError`, or `ValueError` for what is no HTTP."""
        return cast(bytes, await self._head)

    def hand_on(self, web: WebSocketLink) -> None:
        """The connection may be lost already."""
        self._web, early, self._buffer = web, self._buffer, b""
        if early:
            web.feed_data(early)
        if self._lost:
            web.feed_eof()

    def data_received(self, data: bytes) -> None:
        if self._web is not None:
            self._web.feed_data(data)
            return
        self._buffer += data
        if not self._head.done():
            self._look()

    def _look(self) -> None:
        head, end, rest = self._buffer.partition(END)
        if end:
            self._head.set_result(head)
            self._buffer = rest
        elif not self._buffer.startswith(b"HTTP/"[: len(self._buffer)]):
            self._head.set_exception(ConnectionResetError("what answers is no HTTP server"))
        elif len(self._buffer) > MOST_HEAD:
            self._head.set_exception(ValueError("an answer without an end"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._web is not None:
            self._web.feed_eof()
        elif not self._head.done():
            why = exc if isinstance(exc, ssl.SSLError) else ConnectionResetError("hung up without an answer")
            self._head.set_exception(why)
            self._head.exception()  # nobody may be waiting yet


async def upgraded(address: Address, tls: ssl.SSLContext | None) -> tuple[asyncio.Transport, Opening]:
    """Raises `ApiUnavailable` when trying again may help, and what else `unreachable` and `refused` say."""
    try:
        transport, opening = await _dialled(address, tls)
        try:
            await _shaken(address, transport, opening)
        except BaseException:
            transport.abort()
            raise
    except (OSError, TimeoutError, UnicodeError) as error:
        raise unreachable(address, error) from error
    return transport, opening


async def _dialled(address: Address, tls: ssl.SSLContext | None) -> tuple[asyncio.Transport, Opening]:
    """Raises `OSError`, `TimeoutError`, and `UnicodeError` for a host that cannot be one."""
    loop = asyncio.get_running_loop()
    if address.unix:
        return await _in_time(loop.create_unix_connection(Opening, address.unix))
    parts = urlsplit(address.base)
    secure, host = parts.scheme == "https", parts.hostname or ""
    sock = await _connected(host, parts.port or (443 if secure else 80))
    try:
        if not secure:
            return await _in_time(loop.create_connection(Opening, sock=sock))
        context = tls or ssl.create_default_context()
        return await _in_time(loop.create_connection(Opening, sock=sock, ssl=context, server_hostname=host))
    except BaseException:
        sock.close()
        raise


async def _connected(host: str, port: int) -> socket.socket:
    """The first of the host's addresses that answers; else the last one's failure is raised."""
    loop = asyncio.get_running_loop()
    failure: OSError = ConnectionRefusedError("a host without an address")
    for family, type_, number, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, type_, number)
        try:
            sock.setblocking(False)
            await _in_time(loop.sock_connect(sock, address))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


async def _in_time(work: Awaitable[T]) -> T:
    async with asyncio.timeout(PATIENCE):
        return await work


async def _shaken(address: Address, transport: asyncio.Transport, opening: Opening) -> None:
    """Raises `OSError` and `TimeoutError` beside our own."""
    key = new_key()
    transport.write(request_head(urlsplit(address.base), address.token, key))
    try:
        status, headers = parsed(await _in_time(opening.head()))
    except ValueError as error:
        raise ProtocolError(f"{address} did not open a WebSocket: {error}") from error
    if status != 101:
        raise refused(address, status)
    if headers.get("sec-websocket-accept") != accept_key(key):
        raise ProtocolError(f"{address} did not open a WebSocket")


def request_head(base: SplitResult, token: str, key: str) -> bytes:
    """Raises `UnicodeError` for a host that cannot be one."""
    host = base.netloc if base.netloc.isascii() else base.netloc.encode("idna").decode()
    lines = [
        "GET /v1/connect HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
        *([f"Authorization: Bearer {token}"] if token else []),
    ]
    return "\r\n".join(lines).encode() + END


def parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in small letters. Raises `ValueError`."""
    first, *rest = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdigit():
        raise ValueError("its answer is no HTTP/1.1")
    pairs = (line.partition(":") for line in rest)
    return int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs}
