"""Byte streams with offsets and credit, for either end of a call.

`ByteReceiver` turns DATA/EOF frames into an async iterator and gives credit as the reader takes bytes. `ByteSender`
cuts writes into frames, waits for credit, and keeps the last window's bytes so that it can send again from an earlier
offset after a reconnect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from barchan.errors import BarchanError, ProtocolError
from barchan.wire.frames import CHUNK

WINDOW = 1 << 20
"""Bytes a receiver takes ahead of its reader."""


class ByteReceiver:
    """The reading end of one stream. `grant(limit)` sends a CREDIT frame; call `open` once to give the first."""

    def __init__(self, grant: Callable[[int], None], *, offset: int = 0, window: int = WINDOW) -> None:
        self.grant = grant
        self.offset = offset
        """The next byte expected from the sender."""
        self.dropped = 0
        self._taken = offset
        self._granted = offset
        self._window = window
        self._chunks: deque[bytes] = deque()
        self._ended = False
        self._error: BarchanError | None = None
        self._wake: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Give credit from here. Also after a reconnect."""
        self._granted = self._taken + self._window
        self.grant(self._granted)

    def feed(self, offset: int, data: bytes) -> None:
        """Bytes that begin at `offset`. What was seen before is skipped; a gap is a `ProtocolError`."""
        if offset > self.offset:
            raise ProtocolError(f"output has a gap: expected {self.offset}, got {offset}")
        fresh = data[self.offset - offset :]
        if fresh:
            self.offset += len(fresh)
            self._chunks.append(fresh)
            self._notify()

    def feed_eof(self, total: int, dropped: int) -> None:
        if total - dropped != self.offset:
            raise ProtocolError(f"output ends at {total - dropped}, but {self.offset} bytes arrived")
        self.dropped = dropped
        self._ended = True
        self._notify()

    def fail(self, error: BarchanError) -> None:
        """Readers get `error` after what has already arrived."""
        self._error = error
        self._notify()

    @property
    def ended(self) -> bool:
        return self._ended

    async def read(self) -> bytes:
        """The next bytes, or b"" at the end."""
        while not self._chunks:
            if self._ended:
                return b""
            if self._error is not None:
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        chunk = self._chunks.popleft()
        self._taken += len(chunk)
        if not self._ended and self._granted - self._taken <= self._window // 2:
            self.open()
        return chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None


class ByteSender:
    """The writing end of one stream. `send(offset, data)` and `finish(total)` put frames on the link."""

    def __init__(self, send: Callable[[int, bytes], None], finish: Callable[[int], None], *, limit: int = 0) -> None:
        self._send = send
        self._finish = finish
        self.offset = 0
        """Bytes written so far."""
        self._limit = limit
        self._kept: deque[tuple[int, bytes]] = deque()
        self._eof = False
        self._error: BarchanError | None = None
        self._wake: asyncio.Future[None] | None = None

    def grant(self, limit: int) -> None:
        """A CREDIT frame came."""
        if limit > self._limit:
            self._limit = limit
            self._notify()

    def rewind(self, offset: int, limit: int) -> None:
        """After a reconnect: the other side has everything below `offset` and takes bytes below `limit`."""
        if self._kept and offset < self._kept[0][0]:
            raise ProtocolError("the other side lost input that it had taken")
        self._limit = max(limit, self.offset)
        for start, data in list(self._kept):
            if start + len(data) > offset:
                self._send(max(start, offset), data[max(0, offset - start) :])
        if self._eof:
            self._finish(self.offset)

    def fail(self, error: BarchanError) -> None:
        self._error = error
        self._notify()

    async def write(self, data: bytes) -> None:
        """Returns when all of it is on the link, not when the program read it. One writer at a time."""
        view = memoryview(data)
        while len(view):
            await self._room()
            piece = bytes(view[: min(CHUNK, self._limit - self.offset)])
            self._keep(piece)
            self._send(self.offset, piece)
            self.offset += len(piece)
            view = view[len(piece) :]

    def eof(self) -> None:
        """No more bytes. Idempotent."""
        if not self._eof:
            self._eof = True
            self._finish(self.offset)

    async def _room(self) -> None:
        while self._limit <= self.offset:
            if self._error is not None:
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._error is not None:
            raise self._error

    def _keep(self, piece: bytes) -> None:
        self._kept.append((self.offset, piece))
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) + 2 * WINDOW <= self.offset:
            self._kept.popleft()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None
