"""From an address to an open WebSocket, blocking."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

from barchan.errors import ProtocolError
from barchan.sdk._address import Address
from barchan.sdk._failures import refused, unreachable
from barchan.sdk._upgrade import END, MOST_HEAD, PATIENCE, parsed, request_head
from barchan.wire.frames import Payload
from barchan.wire.websocket import accept_key, new_key

_ROOM = 64 << 10


class Tls:
    """TLS between bytes and bytes, so that reading and writing threads share no socket of `ssl`, which is not made for that."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self.ended = False
        self._object = context.wrap_bio(self._arrived, self._leaving, server_hostname=host)

    def shake_hands(self, sock: socket.socket) -> None:
        """Raises `OSError`, of which `SSLError` is one."""
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(self._leaving.read())
                data = sock.recv(_ROOM)
                if not data:
                    raise ConnectionResetError("hung up during the TLS handshake") from None
                self._arrived.write(data)
            else:
                sock.sendall(self._leaving.read())
                return

    def sealed(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._leaving.read()

    def opened(self, data: Payload) -> bytes:
        """What has arrived whole. `ended` says whether there will be more."""
        self._arrived.write(data)
        parts = []
        try:
            while part := self._object.read(_ROOM):
                parts.append(part)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        return b"".join(parts)


def upgraded(address: Address, tls: ssl.SSLContext | None) -> tuple[socket.socket, Tls | None, bytes]:
    """With what came after the handshake. Raises `ApiUnavailable` when trying again may help, and what else `unreachable` and `refused` say."""
    try:
        sock = _dialled(address)
    except (OSError, UnicodeError) as error:
        raise unreachable(address, error) from error
    try:
        sealing = _secured(address, sock, tls)
        early = _shaken(address, sock, sealing)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise unreachable(address, error) from error
    except BaseException:
        sock.close()
        raise
    return sock, sealing, early


def _dialled(address: Address) -> socket.socket:
    """Raises `OSError`, and `UnicodeError` for a host that cannot be one."""
    if not address.unix:
        parts = urlsplit(address.base)
        sock = socket.create_connection((parts.hostname, parts.port or _port(parts.scheme)), PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(PATIENCE)
        sock.connect(address.unix)
    except BaseException:
        sock.close()
        raise
    return sock


def _port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def _secured(address: Address, sock: socket.socket, tls: ssl.SSLContext | None) -> Tls | None:
    if address.unix or not address.base.startswith("https:"):
        return None
    sealing = Tls(tls or ssl.create_default_context(), urlsplit(address.base).hostname or "")
    sealing.shake_hands(sock)
    return sealing


def _shaken(address: Address, sock: socket.socket, tls: Tls | None) -> bytes:
    """The WebSocket handshake. Returns what came after it."""
    key = new_key()
    request = request_head(urlsplit(address.base), address.token, key)
    sock.sendall(request if tls is None else tls.sealed(request))
    try:
        head, early = _answer(sock, tls)
        status, headers = parsed(head)
    except ValueError as error:
        raise ProtocolError(f"{address} did not open a WebSocket: {error}") from error
    if status != 101:
        raise refused(address, status)
    if headers.get("sec-websocket-accept") != accept_key(key):
        raise ProtocolError(f"{address} did not open a WebSocket")
    return early


def _answer(sock: socket.socket, tls: Tls | None) -> tuple[bytes, bytes]:
    """Its head, and what came behind it. Raises `OSError`, and `ValueError` for what is no HTTP."""
    buffer = b""
    while END not in buffer:
        data = sock.recv(_ROOM)
        if not data:
            raise ConnectionResetError("hung up without an answer")
        buffer += data if tls is None else tls.opened(data)
        if not buffer.startswith(b"HTTP/"[: len(buffer)]):
            raise ConnectionResetError("what answers is no HTTP server")
        if len(buffer) > MOST_HEAD:
            raise ValueError("an answer without an end")
    head, _, early = buffer.partition(END)
    return head, early
