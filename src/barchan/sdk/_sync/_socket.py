"""One WebSocket to the API and the link on it, for threads. What `sdk/_socket.py` is for the asynchronous client.

A thread of its own reads. What is written is sent by whoever wrote it, before it hands the baton on; only what the kernel
does not take at once is left to another thread, so that a peer that is slow to read holds nobody up.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections import deque
from typing import Self, cast

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError
from barchan.sdk._address import Address
from barchan.sdk._sync import _compat
from barchan.sdk._sync._futures import Task, start, unsent, without_baton
from barchan.sdk._sync._link import Link
from barchan.sdk._sync._upgrade import Tls, upgraded
from barchan.wire.frames import Payload
from barchan.wire.transports import CLOSE_WAIT

MAX_UNSENT = 64 << 20
"""Unsent bytes at which the API counts as stalled."""
_HEARTBEAT = struct.pack("ll", 30, 0)
"""Silence after which the API is asked whether it lives, and once more after which it does not: a `timeval`."""
_BATCH = 1 << 20
_ROOM = 256 << 10
_CONTENT = (Opcode.BINARY, Opcode.CONT)


class Socket:
    """Made by `open`. Once `link` is lost it is of no further use, and closes itself."""

    def __init__(self, address: Address, sock: socket.socket, tls: Tls | None, protocol: ClientProtocol) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _HEARTBEAT)
        self._address = address
        self._sock = sock
        self._tls = tls
        self._protocol = protocol
        self.link = Link(self._write, dialled=True)
        self._parts: deque[Payload] = deque()
        """Frames, not yet in a message."""
        self._raw: deque[memoryview] = deque()
        """For the kernel."""
        self._unsent = 0
        self._sender: Task[None] | None = None
        self._reader = start(self._receive)

    @classmethod
    def open(cls, address: Address, tls: ssl.SSLContext | None) -> Self:
        """Raises `ApiUnavailable` when trying again may help, and what else `unreachable` and `refused` say."""
        return cls(address, *without_baton(upgraded, address, tls))

    def close(self) -> None:
        """Send what is waiting, hang up. Bounded, whatever the API does."""
        until = _compat.monotonic() + CLOSE_WAIT
        self._flush()
        all_sent = self._sender is None or self._sender.done_by(until)
        self.link.close(ApiUnavailable("the client is closed"))
        if all_sent and self._protocol.state is OPEN:
            self._protocol.send_close(1000)
            self._flush()
            self._reader.done_by(until)
        self.abort()
        self._reader.done_by(_compat.monotonic() + CLOSE_WAIT)

    def abort(self) -> None:
        """As when the network loses it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self, *parts: Payload) -> None:
        """The parts of one frame. Never blocks and never raises."""
        self._parts.extend(parts)
        self._unsent += sum(map(len, parts))
        unsent.add(self._flush)

    def _flush(self) -> None:
        try:
            self._push()
        except OSError:
            self._lose("")
        except BaseException:
            # An interrupt may have come when a message was half sent.
            self._lose("")
            raise
        if self._unsent > MAX_UNSENT:
            self._lose(f": the API left more than {MAX_UNSENT} bytes unread")

    def _lose(self, why: str) -> None:
        self._parts.clear()
        self._raw.clear()
        self._unsent = 0
        self.link.close(ApiUnavailable(f"the connection to {self._address} was lost{why}"))
        self.abort()

    def _push(self) -> None:
        """Give the kernel what it takes, and the rest to a thread that waits for it."""
        if self._sender is not None and not self._sender.done():
            return
        if not self._pushed():
            self._sender = start(self._send_rest)

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        try:
            while not self._pushed():
                without_baton(poll.poll)
        except OSError:
            self._lose("")

    def _pushed(self) -> bool:
        """Whether everything was taken."""
        while self._raw or self._message():
            data = self._raw[0]
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            if sent == len(data):
                self._raw.popleft()
            else:
                self._raw[0] = data[sent:]
        return True

    def _message(self) -> bool:
        """Make the next bytes for the kernel. Returns whether there are any."""
        parts, size = [], 0
        while self._parts and size < _BATCH:
            parts.append(self._parts.popleft())
            size += len(parts[-1])
        if parts and self._protocol.state is OPEN:
            self._protocol.send_binary(b"".join(parts))
        self._unsent -= size
        for data in self._protocol.data_to_send():
            if data:
                self._raw.append(memoryview(data if self._tls is None else self._tls.sealed(data)))
        return bool(self._raw)

    def _receive(self) -> None:
        error: BarchanError = ApiUnavailable(f"the connection to {self._address} was lost")
        room = memoryview(bytearray(_ROOM))
        try:
            while (size := self._arrived(room)) and self._take(room[:size]):
                unsent.add(self._flush)
            self._flush()
        except ProtocolError as broken:
            error = broken
        except OSError:
            pass
        finally:
            self.link.close(error)
            self.abort()
            if self._sender is not None:
                self._sender.done_by(_compat.monotonic() + CLOSE_WAIT)
            unsent.discard(self._flush)
            self._sock.close()

    def _arrived(self, room: memoryview) -> int:
        """How many bytes came. 0 at the end, and when the API does not even answer a ping. Raises `OSError`."""
        try:
            return without_baton(self._sock.recv_into, room)
        except BlockingIOError:
            self._protocol.send_ping(b"alive?")
            self._flush()
        try:
            return without_baton(self._sock.recv_into, room)
        except BlockingIOError:
            return 0

    def _take(self, data: memoryview) -> bool:
        """Returns whether more may come."""
        self._protocol.receive_data(cast(bytes, data) if self._tls is None else self._tls.opened(data))
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in _CONTENT:
                self.link.feed(cast(bytes, event.data))
            elif isinstance(event, Frame) and event.opcode is Opcode.CLOSE:
                return False
        if self._protocol.parser_exc is not None:
            raise ProtocolError(f"{self._address} broke the WebSocket protocol: {self._protocol.parser_exc}")
        return self._tls is None or not self._tls.ended
