"""Opens everything that needs root, before the process gives it up: sockets, the token, the TLS key."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Self

from barchan.config import ApiConfig
from barchan.errors import Conflict, InvalidRequest

BACKLOG = 1024


class Opened:
    """Bound, not yet listening. A context manager: closes what nobody took over."""

    def __init__(self, config: ApiConfig) -> None:
        self._stack = contextlib.ExitStack()
        with self._stack:
            self.token = _read_token(config)
            self.tls = _tls(config)
            self.tcp = self._keep(_bind_tcp(config)) if config.listen is not None else None
            config.layout.run.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.api = self._keep(bind_unix(config.layout.api_socket))
            self.node = self._keep(bind_unix(config.layout.node_socket))
            self._stack = self._stack.pop_all()

    def _keep(self, sock: socket.socket) -> socket.socket:
        return self._stack.enter_context(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """Of the TCP address, or an empty string."""
        if self.tcp is None:
            return ""
        host, port = self.tcp.getsockname()[:2]
        return f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def bind_unix(path: Path) -> socket.socket:
    """A bound socket of mode 0600. A file left by a dead process is replaced; a live one is a `Conflict`."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(old)
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Conflict(f"{path} exists and is not a socket", hint="move it away")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise Conflict(f"another process serves {path}", hint="barchan down")


def _read_token(config: ApiConfig) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        token = config.layout.token.read_bytes().strip()
        if len(token) >= 16:
            return token
    if config.listen is None:
        return None
    raise InvalidRequest(
        f"{config.layout.token} holds no token of 16 bytes or more", field="token", hint="`barchan up` makes one"
    )


def _tls(config: ApiConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise InvalidRequest("TLS needs a certificate and its key", field="tls_cert", hint="--tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"TLS certificate or key: {error}", field="tls_cert") from error
    return context


def _bind_tcp(config: ApiConfig) -> socket.socket:
    assert config.listen is not None
    host, port = config.listen
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InvalidRequest(f"listen: {host!r}: {error}", field="listen") from error
    # What is bound is the address that was judged, not the name again.
    if config.tls_cert is None and not config.insecure and not ipaddress.ip_address(address[0]).is_loopback:
        raise InvalidRequest(
            f"listen: {host}:{port} would carry the token in plaintext beyond this host",
            field="listen",
            hint="give --tls-cert and --tls-key, or --insecure",
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            taken = f"listen: {host}:{port} is used by another process"
            raise Conflict(taken, field="listen", hint=f"`ss -ltnp sport = :{port}` says by which") from error
        raise InvalidRequest(f"listen: {host}:{port}: {error.strerror}", field="listen") from error
    sock.setblocking(False)
    return sock
