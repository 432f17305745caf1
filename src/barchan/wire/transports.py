"""What carries a link: a stream socket (`LinkProtocol`), or messages (`Outbox` for the sending half)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError
from barchan.wire.frames import Payload
from barchan.wire.link import JOINED, Handler, Link

logger = logging.getLogger(__name__)
MAX_MESSAGE = 4 << 20
"""Bytes of one WebSocket message, either way."""
MAX_UNSENT = 64 << 20
"""Unsent bytes at which a peer counts as stalled and its connection is dropped."""
_BATCH = 1 << 20


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
        self.link = Link(self._send, handler, dialled=dialled)
        self._lost = lost
        self._on_close = on_close
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Payload] = []
        self._room = memoryview(b"")

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "not connected yet"
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

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

    def _send(self, *parts: Payload) -> None:
        # A write is a system call at once, and one step of a handler often sends several frames.
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.extend(parts)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self.transport.is_closing():
            return
        if sum(map(len, unsent)) < JOINED:
            self.transport.write(b"".join(unsent))
        else:
            self.transport.writelines(unsent)
        if self.transport.get_write_buffer_size() > MAX_UNSENT:
            logger.warning("link dropped: the peer does not read")
            self.transport.abort()


class Outbox:
    """Bytes waiting for a transport of messages. What is written within one turn of the loop leaves as one message."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]], *, most: int = MAX_UNSENT) -> None:
        self._send = send
        self._most = most
        self._frames: deque[tuple[Payload, ...]] = deque()
        self._size = 0
        self._overflowed = False
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def unsent(self) -> int:
        return self._size

    def write(self, *parts: Payload) -> None:
        """The parts of one frame. Never blocks and never raises: a peer that does not read makes `run` fail."""
        self._size += sum(map(len, parts))
        if self._size > self._most:
            self._overflowed = True
            self._frames.clear()
        else:
            self._frames.append(parts)
        self._notify()

    def close(self) -> None:
        """Let `run` send what is left and return."""
        self._closed = True
        self._notify()

    async def run(self) -> None:
        """Send until closed. Raises `ApiUnavailable` when more than `most` bytes wait, and what `send` raises."""
        while True:
            while self._frames:
                message = self._message()
                await self._send(message)
                self._size -= len(message)
            if self._overflowed:
                raise ApiUnavailable(f"the peer left more than {self._most} bytes unread")
            if self._closed:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _message(self) -> bytes:
        parts, size = list(self._frames.popleft()), 0
        while self._frames and size < _BATCH:
            frame = self._frames.popleft()
            parts += frame
            size += len(frame[-1])
        return b"".join(parts)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
