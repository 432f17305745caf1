"""Servers of an Internet that is a network namespace: names, and pages by HTTP."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address

from tests.netns import Namespace

_HEAD = struct.Struct(">6H")
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
_A = 1


@contextlib.contextmanager
def names(where: Namespace, address: str, known: Mapping[str, str]) -> Iterator[list[str]]:
    """Answers questions for IPv4 addresses. Yields what was asked."""
    asked: list[str] = []
    receiver = where.receive(address, 53)
    receiver.settimeout(None)

    def serve() -> None:
        while True:
            try:
                question, peer = receiver.recvfrom(512)
            except OSError:
                return
            if len(question) > _HEAD.size:
                receiver.sendto(_answer(question, known, asked), peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        with contextlib.suppress(OSError):
            receiver.shutdown(socket.SHUT_RDWR)  # not connected, and yet it wakes who reads
        thread.join(5)


def _answer(question: bytes, known: Mapping[str, str], asked: list[str]) -> bytes:
    name, end = _name(question)
    (kind,) = struct.unpack_from(">H", question, end)
    address = known.get(name) if kind == _A else None
    asked.append(name)
    head = _HEAD.pack(int.from_bytes(question[:2]), _ANSWER if name in known else _NO_SUCH_NAME, 1, bool(address), 0, 0)
    records = b"" if address is None else struct.pack(">3HIH", 0xC00C, _A, 1, 60, 4) + IPv4Address(address).packed
    return head + question[_HEAD.size : end + 4] + records


def _name(question: bytes) -> tuple[str, int]:
    labels, at = [], _HEAD.size
    while size := question[at]:
        labels.append(question[at + 1 : at + 1 + size].decode().lower())
        at += 1 + size
    return ".".join(labels), at + 1


@contextlib.contextmanager
def pages(where: Namespace, address: str, port: int, content: Mapping[str, bytes]) -> Iterator[list[str]]:
    """Serves them by path. Yields from where each request came."""
    peers: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            peers.append(str(self.client_address[0]))
            body = content.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    with where.inside():
        server = ThreadingHTTPServer((address, port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield peers
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
