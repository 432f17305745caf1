"""Network namespaces that tests make, held by a descriptor alone: with it goes everything in them."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from barchan.kernel import netns

_libc = ctypes.CDLL(None, use_errno=True)
SILENCE = 0.3
"""Seconds after which a packet over devices of one host is not coming any more."""


def unshare(kinds: int) -> None:
    assert not _libc.unshare(kinds), os.strerror(ctypes.get_errno())


class Namespace:
    """One, with loopback up. What `run` and the sockets do happens in it."""

    def __init__(self, undo: ExitStack, fd: int | None = None) -> None:
        """A new one, or `fd`, which is closed at the end."""
        self.fd = netns.new() if fd is None else fd
        self._undo = undo
        undo.callback(os.close, self.fd)
        self.run("ip link set lo up")

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        with netns.entered(self.fd):
            yield

    def run(self, command: str, text: str = "") -> str:
        with self.inside():
            done = subprocess.run(command.split(), input=text, capture_output=True, text=True, check=False)
        assert not done.returncode, f"{command}: {done.stderr}"
        return done.stdout

    def listen(self, address: str, port: int) -> socket.socket:
        """TCP. Connections are there without being accepted."""
        listener = self.socket(address, socket.SOCK_STREAM)
        listener.bind((address, port))
        listener.listen()
        return listener

    def receive(self, address: str, port: int) -> socket.socket:
        """UDP."""
        receiver = self.socket(address, socket.SOCK_DGRAM)
        receiver.bind((address, port))
        return receiver

    def connect(self, address: str, port: int) -> socket.socket:
        client = self.socket(address, socket.SOCK_STREAM)
        client.settimeout(5)
        client.connect((address, port))
        return client

    def send(self, address: str, port: int, source: str = "") -> None:
        """One datagram. Refusals are the receiver's to notice."""
        sender = self.socket(address, socket.SOCK_DGRAM)
        if source:
            sender.bind((source, 0))
        sender.sendto(b"x", (address, port))

    def socket(self, address: str, kind: socket.SocketKind) -> socket.socket:
        """Of the family of `address`, closed at the end."""
        with self.inside():
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
        return self._undo.enter_context(made)


def source(receiver: socket.socket) -> str | None:
    """From where the datagram came that is there, or None when there is none."""
    if not select.select([receiver], [], [], SILENCE)[0]:
        return None
    return str(receiver.recvfrom(16)[1][0])
