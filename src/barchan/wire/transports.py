"""What carries a link: a stream socket (`LinkProtocol`), or an open WebSocket (`WebSocketLink`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import cast

from barchan.errors import BarchanError, ProtocolError
from barchan.wire.frames import Payload
from barchan.wire.link import JOINED, Handler, Link
from barchan.wire.websocket import CloseCode, Decoder, Opcode, apply_mask, close_payload, head, new_mask

logger = logging.getLogger(__name__)
MAX_UNSENT = 64 << 20
"""Unsent bytes at which a peer counts as stalled and its connection is dropped."""
SEND_BUFFER = 512 << 10
"""Bytes asked for; the kernel doubles them, and gives what its `net.core.wmem_max` allows."""
MESSAGE = 1 << 20
"""Bytes from which on a WebSocket message takes no further frame."""
SILENCE = 30.0
"""Seconds without a byte after which the other side is asked whether it lives, and after two of which it does not."""
CLOSE_WAIT = 5.0
"""Seconds that the other side has to hang up in turn."""


class _Outgoing:
    """Writes frames to a transport. Never blocks and never raises; a peer that does not read is dropped.

    A write is a system call at once: mostly it is the only one of a turn of the loop, and somebody waits for it. What follows
    it leaves together at the turn's end.
    """

    def __init__(self, wrap: Callable[[list[Payload]], list[Payload]] | None = None) -> None:
        self.transport: asyncio.Transport | None = None
        self._wrap = wrap
        self._gathering = False
        self._parts: list[Payload] = []

    def write(self, *parts: Payload) -> None:
        """The parts of one frame."""
        if self._gathering:
            self._parts.extend(parts)
            return
        self._gathering = True
        asyncio.get_running_loop().call_soon(self.flush)
        self._put(list(parts))

    def flush(self) -> None:
        """Send what was gathered."""
        self._gathering = False
        if self._parts:
            parts, self._parts = self._parts, []
            self._put(parts)

    def _put(self, parts: list[Payload]) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._wrap is not None:
            parts = self._wrap(parts)
        if len(parts) == 1:
            transport.write(parts[0])
        elif sum(map(len, parts)) < JOINED:
            transport.write(b"".join(parts))
        else:
            transport.writelines(parts)
        if transport.get_write_buffer_size() > MAX_UNSENT:
            logger.warning("link dropped: the peer does not read")
            transport.abort()


def widen(transport: asyncio.Transport) -> None:
    """Let the kernel take more at once on a unix socket: by default a large frame does not fit, and each end waits for the other.

    TCP finds its own size.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


class LinkProtocol(asyncio.BufferedProtocol):
    """A link on a stream socket, either end.

    `lost` is the error that calls in flight fail with when the connection goes; `on_close` is called once after that.
    """

    def __init__(
        self,
        handler: Handler | None,
        *,
        dialled: bool,
        lost: Callable[[], BarchanError],
        on_close: Callable[[LinkProtocol], None] | None = None,
    ) -> None:
        self._outgoing = _Outgoing()
        self.link = Link(self._outgoing.write, handler, dialled=dialled)
        self._lost = lost
        self._on_close = on_close
        self._room = memoryview(b"")

    @property
    def transport(self) -> asyncio.Transport:
        assert self._outgoing.transport is not None, "not connected yet"
        return self._outgoing.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._outgoing.transport = cast(asyncio.Transport, transport)
        widen(self._outgoing.transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._room = self.link.room()
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.link.received(self._room, nbytes)
        except ProtocolError as error:
            logger.warning("link dropped: %s", error)
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.link.close(self._lost())
        if self._on_close is not None:
            self._on_close(self)

    def close(self, error: BarchanError | None = None) -> None:
        """Fail what is in flight and hang up at once."""
        self.link.close(error or self._lost())
        self.transport.abort()


class WebSocketLink:
    """A link on an open WebSocket, either end. A server's aiohttp hands it what arrives, as to a parser of its own, and so does
    the client's protocol.

    `lost` is the error that calls in flight fail with when the connection goes; `closed` is set after that.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        handler: Handler | None,
        *,
        dialled: bool,
        lost: Callable[[], BarchanError],
    ) -> None:
        self._transport = transport
        self._masking = dialled
        self._outgoing = _Outgoing(self._messages)
        self._outgoing.transport = transport
        widen(transport)
        self.link = Link(self._outgoing.write, handler, dialled=dialled)
        self._lost = lost
        self._decoder = Decoder(masked=not dialled)
        self._closing = False
        self._broken = False
        self._asked = False
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(SILENCE, self._tick)
        self.closed = asyncio.Event()

    # --- what arrives

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Whether the connection is of no further use, and nothing left over."""
        if self._broken:
            return False, b""
        self._heard, self._asked = self._loop.time(), False
        try:
            for opcode, piece in self._decoder.feed(data):
                if opcode == Opcode.BINARY:
                    self.link.feed(piece)
                else:
                    self._control(opcode, piece)
        except ProtocolError as error:
            logger.warning("link dropped: %s", error)
            self._broken = True
            self.link.close(error)
            self.close(CloseCode.PROTOCOL_ERROR, str(error))
        return False, b""

    def feed_eof(self) -> None:
        self._timer.cancel()
        self.link.close(self._lost())
        self.closed.set()

    # --- closing

    def abort(self) -> None:
        """Hang up at once."""
        self._transport.abort()

    def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Send what is waiting and say goodbye; `closed` is set once the other side hung up, or did not in time."""
        if self._say_goodbye(close_payload(code, reason)):
            self._timer.cancel()
            self._timer = self._loop.call_later(CLOSE_WAIT, self._transport.abort)

    def _say_goodbye(self, payload: bytes) -> bool:
        """Nothing may follow it. Returns whether it had not been said before."""
        if self._closing:
            return False
        self._closing = True
        self._outgoing.flush()
        self._outgoing.transport = None
        self._send_control(Opcode.CLOSE, payload)
        return True

    def _control(self, opcode: int, data: Payload) -> None:
        if opcode == Opcode.PING:
            self._send_control(Opcode.PONG, data)
        elif opcode == Opcode.CLOSE:
            self._say_goodbye(bytes(data[:2]))
            self._transport.close()

    def _tick(self) -> None:
        """Every `SILENCE` seconds at the latest, see whether anything came since."""
        silent = self._loop.time() - self._heard
        if self._asked and silent >= SILENCE:
            logger.warning("link dropped: the peer does not answer")
            self._transport.abort()
            return
        if silent >= SILENCE:
            self._asked = True
            self._send_control(Opcode.PING, b"")
        self._timer = self._loop.call_later(SILENCE if self._asked else SILENCE - silent, self._tick)

    # --- sending

    def _send_control(self, opcode: int, data: Payload) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._message(opcode, [data])))

    def _messages(self, parts: list[Payload]) -> list[Payload]:
        wrapped: list[Payload] = []
        for some in _batches(parts):
            wrapped += self._message(Opcode.BINARY, some)
        return wrapped

    def _message(self, opcode: int, parts: list[Payload]) -> list[Payload]:
        if not self._masking:
            return [head(opcode, sum(map(len, parts))), *parts]
        mask, data = new_mask(), b"".join(parts)
        return [head(opcode, len(data), mask), apply_mask(data, mask)]


def _batches(parts: list[Payload]) -> Iterator[list[Payload]]:
    some: list[Payload] = []
    size = 0
    for part in parts:
        some.append(part)
        size += len(part)
        if size >= MESSAGE:
            yield some
            some, size = [], 0
    if some:
        yield some
