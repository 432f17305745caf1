"""The link to one guest: dial, greet, send operations, deliver their frames. Survives hang-ups by dialling again.

The guest is hostile. Whatever breaks the protocol ends the connection with `ProtocolError`; the sandbox then counts as
failed. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from barchan.errors import ProtocolError, SandboxUnavailable
from barchan.wire import guest
from barchan.wire.frames import Frame, FrameReader, FrameType, Payload, coalesce, encode

FrameSink = Callable[[Frame], None]
GREETING_SECONDS = 10.0
COALESCED = 1024
"""Bytes received at once from which on joining their frames pays."""
LATER_SECONDS = 0.02
"""How long what nobody waits for may gather before it is sent."""
MOST_EARLY = 16384
"""Without credit the guest can tell three ends of each of its operations, and their input credit."""
MOST_EARLY_BYTES = 32 << 20
"""Of all their payloads. The largest end of an operation takes 16 KiB."""
_FOR_OPERATIONS = frozenset(
    (FrameType.STARTED, FrameType.DATA, FrameType.EOF, FrameType.CREDIT, FrameType.DONE, FrameType.REFUSED)
)


class GuestChannel(asyncio.BufferedProtocol):
    """One connection. `greeted` resolves to the guest's WELCOME; `on_lost` is called once when it ends."""

    def __init__(self, on_lost: Callable[[GuestChannel, Exception], None]) -> None:
        self._on_lost = on_lost
        self._reader = FrameReader(guest.MAX_FROM_GUEST)
        self._room = memoryview(b"")
        self._transport: asyncio.Transport | None = None
        self._sinks: dict[int, FrameSink] = {}
        self._early: list[Frame] | None = []
        self.early_bytes = 0
        """Kept until `deliver`."""
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._next_ping = 0
        self._unsent: list[bytes] = []
        self._together = False
        self._timer: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None
        self.greeted: asyncio.Future[guest.Welcome] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(guest.hello())

    def get_buffer(self, sizehint: int) -> memoryview:
        self._room = self._reader.room()
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        frames = self._reader.received(self._room, nbytes)
        self._take_all(coalesce(frames) if nbytes > COALESCED else frames)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        error = self._fault or exc or SandboxUnavailable("the guest hung up")
        if not self.greeted.done():
            self.greeted.set_exception(SandboxUnavailable(f"no greeting from the guest: {error}"))
            self.greeted.exception()
        for ping in self._pings.values():
            ping.cancel()
        self._on_lost(self, error)

    async def greet(self) -> guest.Welcome:
        """Wait for the WELCOME. Raises `SandboxUnavailable`, also when the guest hung up right behind it."""
        try:
            welcome = await asyncio.wait_for(asyncio.shield(self.greeted), GREETING_SECONDS)
        except TimeoutError as error:
            raise SandboxUnavailable("the guest does not answer", phase="greet") from error
        if self._transport is None:
            raise SandboxUnavailable("the guest hung up after its greeting", phase="greet")
        return welcome

    def send(self, data: bytes) -> None:
        """Frames for the guest, at once: a write is a system call. Dropped when the connection is gone; `on_lost` has said so."""
        if self._together or self._unsent:
            self._unsent.append(data)
            if not self._together:
                self._flush()
        elif self._transport is not None:
            self._transport.write(data)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What the block sends leaves in one write."""
        outer, self._together = self._together, True
        try:
            yield
        finally:
            self._together = outer
            if not outer:
                self._flush()

    def send_later(self, data: bytes) -> None:
        """As `send`, but in good time: what only frees memory of the guest need not wake it."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATER_SECONDS, self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(b"".join(unsent))

    def send_frame(self, type_: int, op: int, payload: Payload = b"", stream: int = 0) -> None:
        self.send(encode(type_, op, payload, stream))

    def listen(self, op: int, sink: FrameSink) -> None:
        """Deliver the frames of an operation."""
        self._sinks[op] = sink

    def deliver(self) -> None:
        """Every sink is set: hand out what the guest said of running operations since its greeting."""
        early, self._early = self._early or [], None
        self._take_all(early)

    def release(self, op: int) -> None:
        """The result is recorded: the guest may drop the operation."""
        if self._sinks.pop(op, None) is not None:
            self.send_later(encode(FrameType.FORGET, op))

    async def ping(self, seconds: float) -> None:
        """Raises `SandboxUnavailable` when the guest does not answer in time."""
        self._next_ping += 1
        number = self._next_ping
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings[number] = answer
        self.send_frame(FrameType.PING, number)
        try:
            await asyncio.wait_for(answer, seconds)
        except (TimeoutError, asyncio.CancelledError) as error:
            raise SandboxUnavailable("the guest does not answer", phase="ping") from error
        finally:
            self._pings.pop(number, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take_all(self, frames: Iterable[Frame]) -> None:
        try:
            for frame in frames:
                self._take(frame)
        except ProtocolError as error:
            self._fault = error
            self.close()

    def _take(self, frame: Frame) -> None:
        if frame.type == FrameType.WELCOME:
            self._welcome(frame)
        elif frame.type == FrameType.PONG:
            waiter = self._pings.get(frame.id)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif frame.type in _FOR_OPERATIONS:
            self._hand_out(frame)
        else:
            raise ProtocolError(f"the guest sent a frame of type {frame.type:#x}")

    def _hand_out(self, frame: Frame) -> None:
        if self._early is None:
            sink = self._sinks.get(frame.id)
            if sink is not None:
                sink(frame)
            return
        self.early_bytes += len(frame.payload)
        if len(self._early) >= MOST_EARLY or self.early_bytes > MOST_EARLY_BYTES:
            raise ProtocolError("the guest goes on without credit")
        self._early.append(frame)

    def _welcome(self, frame: Frame) -> None:
        if self.greeted.done():
            raise ProtocolError("the guest greeted twice")
        welcome = guest.decode_welcome(frame.payload)
        if not guest.VERSION_OLDEST <= welcome.version <= guest.VERSION_NEWEST:
            raise ProtocolError(f"the guest speaks protocol {welcome.version}")
        self.greeted.set_result(welcome)
