"""The streams of one running command as the node sees them: callers' places in its output, what is recorded, its input."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

from barchan.errors import BarchanError
from barchan.wire import guest
from barchan.wire import messages as m
from barchan.wire.frames import Payload
from barchan.wire.streams import WINDOW


class Caller(Protocol):
    """The call side of an exec, as `wire.link.Incoming` is."""

    def send_data(self, stream: int, offset: int, data: Payload) -> None: ...
    def send_eof(self, stream: int, total: int, dropped: int = 0) -> None: ...
    def credit(self, stream: int, limit: int) -> None: ...


class Place(NamedTuple):
    """Where a caller goes on in an output, and how far it takes bytes."""

    offset: int
    limit: int


def places_of(request: m.StartExec | m.AttachExec) -> tuple[Place, Place]:
    """In output and error output."""
    return Place(request.stdout_offset, request.stdout_limit), Place(request.stderr_offset, request.stderr_limit)


class Reader:
    """One caller's place in one output stream."""

    def __init__(self, caller: Caller, stream: int, place: Place) -> None:
        self.caller = caller
        self.stream = stream
        self.offset = place.offset
        self.limit = max(place)
        self.catching_up: asyncio.Task[None] | None = None
        self._ended = False
        self._error: BarchanError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def offer(self, offset: int, data: Payload) -> bool:
        """Send `data` if it is exactly what comes next and fits the credit."""
        if self.catching_up is not None or offset != self.offset or self.limit < offset + len(data):
            return False
        self.caller.send_data(self.stream, offset, data)
        self.offset += len(data)
        return True

    def end(self, total: int, dropped: int) -> None:
        if not self._ended:
            self._ended = True
            self.caller.send_eof(self.stream, total, dropped)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    def fail(self, error: BarchanError) -> None:
        """What it misses cannot be read."""
        self._error = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    async def end_told(self) -> None:
        """Wait until the caller was told the end of the stream. Raises what it failed with."""
        if self._error is not None:
            raise self._error
        if not self._ended:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting


class Output:
    """One output stream of the command."""

    def __init__(self, stream: int, recorded: int = 0) -> None:
        self.stream = stream
        self.received = recorded
        """Bytes that came from the guest."""
        self.recorded = recorded
        self.acknowledged = recorded
        self.granted = 0
        self.readers: list[Reader] = []
        self.eof: tuple[int, int] | None = None

    def wanted(self) -> int:
        """How far the guest may send: what a caller takes, or a window beyond what is recorded."""
        if self.readers:
            return max(reader.limit for reader in self.readers)
        return self.recorded + WINDOW


class Input:
    """The command's input: recorded first, then handed to the guest."""

    def __init__(self) -> None:
        self.limit = guest.INPUT_WINDOW
        """Up to which the guest takes bytes."""
        self.recorded = 0
        """Where a caller that comes back goes on."""
        self.sent = 0
        self.end: int | None = None
        self.resending: asyncio.Task[None] | None = None
