# Generated from src/barchan/wire/streams.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Byte streams with offsets and credit, for either end of a call.

`CallStreams` is the caller's end of a call with streams. `ByteReceiver` turns DATA/EOF frames into reads and gives credit as bytes are taken. `ByteSender` cuts writes into frames,
waits for credit, and keeps the last window's bytes so that it can send again from an earlier offset after a reconnect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial

from barchan.errors import BarchanError, ProtocolError
from barchan.sdk._sync._futures import Future, new_future
from barchan.sdk._sync._link import Call
from barchan.wire.frames import (
    CHUNK,
    STDERR,
    STDIN,
    STDOUT,
    Frame,
    FrameType,
    Payload,
    decode_data,
    decode_eof,
    decode_u64,
)

WINDOW = 1 << 20
"""Bytes a receiver takes ahead of its reader."""
MAX_LISTING = 64 << 20
"""Bytes of a directory listing, which the sandbox makes as long as it likes."""


class Taking(Enum):
    """What a receiver does with bytes that nobody reads yet."""

    BUFFER = "buffer"
    """Keep a window of them, then let the sender wait."""
    COLLECT = "collect"
    """Keep them all. For streams whose length the request bounds."""
    PREFIX = "prefix"
    """Keep the first window, count and drop the rest: nobody reads, but the sender must come to its end."""


class ByteReceiver:
    """The reading end of one stream. `grant(limit)` sends a CREDIT frame; call `open` on each new connection."""

    def __init__(
        self,
        grant: Callable[[int], None],
        *,
        offset: int = 0,
        window: int = WINDOW,
        taking: Taking = Taking.BUFFER,
        most: int = 1 << 62,
        confirmed: bool = False,
    ) -> None:
        """`most` bounds what is kept unread; more is a `ProtocolError`.

        `confirmed`: an EOF frame alone is no end, because the sender also ends a stream that it could not read. Only
        `finish` is one, and only after an EOF frame.
        """
        self.grant = grant
        self.offset = offset
        """The next byte expected from the sender."""
        self.dropped = 0
        """Bytes that the sender dropped at the end (output limit)."""
        self.unread = 0
        """Bytes dropped here because nobody read them."""
        self.ended = False
        self._taking = taking
        self._most = most
        self._confirmed = confirmed
        self._complete = False
        self._taken = offset
        self._granted = offset
        self._window = window
        self._limit = offset + window
        self._chunks: deque[bytes] = deque()
        self._kept = 0
        self._error: BarchanError | None = None
        self._wake: Future[None] | None = None

    def open(self) -> None:
        """Give credit from here. Also after a reconnect."""
        self.grant(self.credit())

    def credit(self) -> int:
        """How far it takes bytes from here, for whoever says so to the sender in another way."""
        self._granted = self._limit = self._taken + self._window
        return self._granted

    def take(self, taking: Taking) -> None:
        """Change what happens to unread bytes. Once bytes were dropped, `PREFIX` stays."""
        if self.unread or taking == self._taking:
            return
        self._taking = taking
        if taking != Taking.BUFFER:
            self._take(self.offset - self._taken)

    def feed(self, offset: int, data: Payload) -> None:
        """Bytes that begin at `offset`. What was seen before is skipped; a gap, or more than the credit, is a `ProtocolError`."""
        if offset + len(data) > self._limit:
            raise ProtocolError(f"output to {offset + len(data)} without credit")
        if offset > self.offset:
            raise ProtocolError(f"output has a gap: expected {self.offset}, got {offset}")
        fresh = bytes(memoryview(data)[self.offset - offset :])
        if not fresh:
            return
        self.offset += len(fresh)
        if self._taking == Taking.PREFIX and (self.unread or self._kept + len(fresh) > self._window):
            self.unread += len(fresh)
        else:
            self._kept += len(fresh)
            if self._kept > self._most:
                raise ProtocolError(f"more than {self._most} bytes were sent")
            self._chunks.append(fresh)
            self._notify()
        if self._taking != Taking.BUFFER:
            self._take(len(fresh))

    def feed_eof(self, total: int, dropped: int) -> None:
        if total - dropped != self.offset:
            raise ProtocolError(f"output ends at {total - dropped}, but {self.offset} bytes arrived")
        self.dropped = dropped
        self._complete = True
        self.ended = not self._confirmed
        self._notify()

    def finish(self) -> None:
        """The call succeeded: nothing more will come."""
        if self._confirmed and not self._complete:
            self.fail(ProtocolError(f"the answer came after {self.offset} bytes, before their end"))
            return
        self.ended = True
        self._notify()

    def fail(self, error: BarchanError) -> None:
        """Readers get `error` after what has already arrived."""
        self._error = error
        self._notify()

    def collected(self) -> bytes:
        """All bytes kept and not read, at once. Raises the error that ended the stream early."""
        if self._error is not None and not self.ended:
            raise self._error
        chunks, self._chunks, self._kept = self._chunks, deque(), 0
        return b"".join(chunks)

    def read(self) -> bytes:
        """The next bytes, or b"" at the end. One reader at a time. Raises the error that ended the stream early."""
        while not self._chunks:
            if self.ended:
                return b""
            if self._error is not None:
                raise self._error
            self._wake = new_future()
            self._wake.wait()
        chunk = self._chunks.popleft()
        self._kept -= len(chunk)
        if self._taking == Taking.BUFFER:
            self._take(len(chunk))
        return chunk

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read():
            yield chunk

    def _take(self, size: int) -> None:
        # What was still unread when the mode changed from collecting is counted already.
        self._taken = min(self._taken + size, self.offset)
        if not self.ended and self._error is None and self._granted - self._taken <= self._window // 2:
            self.open()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None


class ByteSender:
    """The writing end of one stream. `send(offset, data)` and `finish(total)` put frames on the link.

    It starts suspended; `resume` once the other side has said from where it takes bytes (0 for a new stream).
    """

    def __init__(self, send: Callable[[int, bytes], None], finish: Callable[[int], None]) -> None:
        self._send = send
        self._finish = finish
        self.offset = 0
        """Bytes written so far."""
        self._sent = 0
        self._limit = 0
        self._running = False
        self._kept: deque[tuple[int, bytes]] = deque()
        self._eof = False
        self._finished = False
        self._stopped = False
        self.cut = False
        """The other side stopped taking before it had everything and its end."""
        self._error: BarchanError | None = None
        self._wake: Future[None] | None = None

    def suspend(self) -> None:
        """The connection is gone; credit given on it is void."""
        self._running = False
        self._finished = False
        self._limit = 0

    def resume(self, offset: int) -> None:
        """The other side has everything below `offset`: send again from there, skip what is written below it."""
        if self._kept and offset < self._kept[0][0]:
            raise ProtocolError("the other side lost input that it had taken")
        self._sent = offset
        self._running = True
        self._pump()

    def grant(self, limit: int) -> None:
        """A CREDIT frame came."""
        self._limit = max(limit, self._limit)
        self._pump()

    def fail(self, error: BarchanError) -> None:
        self._error = error
        self._notify()

    def stop(self) -> None:
        """The other side wants no more: writes return at once and their bytes go nowhere, as with a program that ended."""
        self.cut = not self._finished
        self._stopped = True
        self._notify()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when all of it was put on the link, not when the program read it. One writer at a time."""
        view = memoryview(data).cast("B")
        if self._stopped:
            return
        for at in range(0, len(view), CHUNK):
            piece = bytes(view[at : at + CHUNK])
            self._kept.append((self.offset, piece))
            self.offset += len(piece)
            self._pump()
            self._drained()

    def eof(self) -> None:
        """No more bytes. Idempotent."""
        self._eof = True
        self._pump()

    def _drained(self) -> None:
        while not self._stopped and (self._sent < self.offset or not self._running):
            if self._error is not None:
                raise self._error
            self._wake = new_future()
            self._wake.wait()
        if self._error is not None:
            raise self._error

    def _pump(self) -> None:
        if not self._running:
            return
        # Almost always only the last piece is unsent; after a resume earlier ones are, too.
        first = len(self._kept)
        while first and self._kept[first - 1][0] + len(self._kept[first - 1][1]) > self._sent:
            first -= 1
        for i in range(first, len(self._kept)):
            start, data = self._kept[i]
            end = min(self._limit, start + len(data))
            if end <= self._sent:
                break
            self._send(self._sent, data[self._sent - start : end - start])
            self._sent = end
        self._trim()
        if self._eof and not self._finished and self._sent >= self.offset:
            self._finished = True
            self._finish(self.offset)
        if self._sent >= self.offset:
            self._notify()

    def _trim(self) -> None:
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) + 2 * WINDOW <= self._sent:
            self._kept.popleft()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None


class CallStreams:
    """The caller's end of one call's streams, over as many connections as the call takes.

    `outputs` are the streams that the operation sends. Give `on_frame` to the call, then `attach` it, or let it `follow`.
    """

    def __init__(
        self,
        *,
        outputs: tuple[int, ...] = (STDOUT,),
        taking: Taking = Taking.BUFFER,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        most: int = 1 << 62,
        confirmed: bool = False,
    ) -> None:
        """`confirmed`: an output is whole only when the answer says so. For all but programs' output."""

        def receiver(stream: int, offset: int) -> ByteReceiver:
            grant = partial(self._credit, stream)
            return ByteReceiver(grant, offset=offset, taking=taking, most=most, confirmed=confirmed)

        self.stdout = receiver(STDOUT, stdout_offset)
        self.stderr = receiver(STDERR, stderr_offset)
        self.stdin = ByteSender(self._data, self._eof)
        self._opened = [(self.stdout, self.stderr)[stream - 1] for stream in outputs]
        self.on_event: Callable[[bytes], None] | None = None
        """Receives the payload of EVENT frames."""
        self._call: Call | None = None

    def attach(self, call: Call, *, credited: bool = False) -> None:
        """Give credit on a new call, unless its request did."""
        self._call = call
        for receiver in self._opened:
            if not receiver.ended and not credited:
                receiver.open()

    def follow(self, call: Call) -> None:
        """Attach to the only call there will be: its answer ends the streams, and a failed one fails them."""
        self.attach(call)
        call.answer.add_done_callback(self._answered)

    def _answered(self, answer: Future[bytes]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, BarchanError):
            self.fail(error)
        elif not answer.cancelled():
            self.finish()

    def detach(self) -> None:
        """The connection is gone. What was received stays."""
        self._call = None
        self.stdin.suspend()

    def finish(self, ends: tuple[tuple[int, int], ...] = ()) -> None:
        """The call was answered: what has not ended by itself has nothing more.

        `ends` are total and dropped bytes of each output, where the answer says them: `ProtocolError` when they are not what came.
        """
        self._call = None
        for receiver, end in zip(self._opened, ends, strict=False):
            if not receiver.ended:
                receiver.feed_eof(*end)
        for receiver in self._opened:
            receiver.finish()
        self.stdin.stop()

    def fail(self, error: BarchanError) -> None:
        """Nothing more will come; readers and the writer get `error`."""
        self._call = None
        for end in (self.stdout, self.stderr, self.stdin):
            end.fail(error)

    def on_frame(self, frame: Frame) -> None:
        """A malformed frame or a gap ends this call alone."""
        try:
            self._take(frame)
        except ProtocolError as error:
            if self._call is not None:
                self._call.drop(error)

    def _take(self, frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            self._output(frame.stream).feed(*decode_data(frame.payload))
        elif frame.type == FrameType.EOF:
            self._output(frame.stream).feed_eof(*decode_eof(frame.payload))
        elif frame.type == FrameType.CREDIT:
            self.stdin.grant(decode_u64(frame.payload))
        elif frame.type == FrameType.EVENT and self.on_event is not None:
            self.on_event(bytes(frame.payload))

    def _output(self, stream: int) -> ByteReceiver:
        if stream not in (STDOUT, STDERR):
            raise ProtocolError(f"output on stream {stream}")
        return self.stdout if stream == STDOUT else self.stderr

    def _credit(self, stream: int, limit: int) -> None:
        if self._call is not None:
            self._call.credit(stream, limit)

    def _data(self, offset: int, data: bytes) -> None:
        if self._call is not None:
            self._call.send_data(STDIN, offset, data)

    def _eof(self, total: int) -> None:
        if self._call is not None:
            self._call.send_eof(STDIN, total)
