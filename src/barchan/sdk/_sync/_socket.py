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
from typing import Self

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError
from barchan.sdk._address import Address
from barchan.sdk._sync import _compat
from barchan.sdk._sync._futures import Task, start, unsent, without_baton
from barchan.sdk._sync._link import Link
from barchan.sdk._sync._upgrade import Tls, upgraded
from barchan.wire.frames import Payload
from barchan.wire.transports import CLOSE_WAIT
from barchan.wire.websocket import CloseCode, Decoder, Opcode, apply_mask, close_payload, head, new_mask

MAX_UNSENT = 64 << 20
"""Unsent bytes at which the API counts as stalled."""
_HEARTBEAT = struct.pack("ll", 30, 0)
"""Silence after which the API is asked whether it lives, and once more after which it does not: a `timeval`."""
_BATCH = 1 << 20
_ROOM = 256 << 10


class Socket:
    """Made by `open`. Once `link` is lost it is of no further use, and closes itself."""

    def __init__(self, address: Address, sock: socket.socket, tls: Tls | None, early: bytes) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _HEARTBEAT)
        self._address = address
        self._sock = sock
        self._tls = tls
        self._early = early
        """What came with the handshake."""
        self._decoder = Decoder(masked=False)
        self._goodbye = False
        """Nothing may be sent after it."""
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
        if all_sent and not self._goodbye:
            self._say_goodbye(close_payload(CloseCode.NORMAL))
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
        if parts and not self._goodbye:
            self._wrap(Opcode.BINARY, b"".join(parts))
        self._unsent -= size
        return bool(self._raw)

    def _wrap(self, opcode: int, data: bytes) -> None:
        mask = new_mask()
        frame = head(opcode, len(data), mask) + apply_mask(data, mask)
        self._raw.append(memoryview(frame if self._tls is None else self._tls.sealed(frame)))

    def _say_goodbye(self, payload: bytes) -> None:
        if not self._goodbye:
            self._goodbye = True
            self._wrap(Opcode.CLOSE, payload)

    def _receive(self) -> None:
        error: BarchanError = ApiUnavailable(f"the connection to {self._address} was lost")
        room = memoryview(bytearray(_ROOM))
        try:
            self._take(self._early)
            while (size := self._arrived(room)) and self._take(self._opened(room[:size])):
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
            if not self._goodbye:
                self._wrap(Opcode.PING, b"")
            self._flush()
        try:
            return without_baton(self._sock.recv_into, room)
        except BlockingIOError:
            return 0

    def _opened(self, data: memoryview) -> Payload:
        return data if self._tls is None else self._tls.opened(data)

    def _take(self, data: Payload) -> bool:
        """Returns whether more may come. Raises `ProtocolError`."""
        for opcode, piece in self._decoder.feed(data):
            if opcode == Opcode.BINARY:
                self.link.feed(piece)
            elif opcode == Opcode.PING and not self._goodbye:
                self._wrap(Opcode.PONG, bytes(piece))
            elif opcode == Opcode.CLOSE:
                self._say_goodbye(bytes(piece[:2]))
                return False
        return self._tls is None or not self._tls.ended
