"""Calls multiplexed over one connection, either way: client ↔ API and API ↔ node.

A call is a CALL frame with a fresh id, then frames with that id both ways, ended by REPLY or ERROR from the side that was
called, or by ABANDON from the caller. The connection itself is somebody else's: give `Link` a `write` function, feed it
what arrives, tell it when the connection is lost.

    caller:   call = link.call(pack_call(request), on_frame);  answer = await call.answer
    called:   async def handler(call: Incoming) -> bytes: …    # the REPLY payload; a BarchanError becomes ERROR

Flow control is per stream (CREDIT frames), so a link never needs to pause as a whole.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from barchan.errors import ApiUnavailable, BarchanError, ErrorBody, InternalError, ProtocolError, from_body
from barchan.wire.frames import Frame, FrameReader, FrameType, encode, encode_credit, encode_data, encode_eof
from barchan.wire.messages import pack, unpack

logger = logging.getLogger(__name__)
FrameSink = Callable[[Frame], None]
_STREAMS = (FrameType.DATA, FrameType.EOF, FrameType.CREDIT, FrameType.EVENT)
_ENDS = (FrameType.REPLY, FrameType.ERROR)


def ignore_frame(frame: Frame) -> None:
    """The sink of a call that has no streams."""


class _Side:
    """What both ends of a call can send."""

    def __init__(self, link: Link, id_: int) -> None:
        self.id = id_
        self._link = link

    def send_frame(self, type_: int, payload: bytes, stream: int = 0) -> None:
        self._link.send(encode(type_, self.id, payload, stream))

    def send_data(self, stream: int, offset: int, data: bytes | memoryview) -> None:
        self._link.send(encode_data(self.id, stream, offset, data))

    def send_eof(self, stream: int, total: int, dropped: int = 0) -> None:
        self._link.send(encode_eof(self.id, stream, total, dropped))

    def credit(self, stream: int, limit: int) -> None:
        self._link.send(encode_credit(self.id, stream, limit))


class Call(_Side):
    """An outgoing call. `answer` resolves to the REPLY payload or raises."""

    def __init__(self, link: Link, id_: int, on_frame: FrameSink) -> None:
        super().__init__(link, id_)
        self.on_frame = on_frame
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def abandon(self) -> None:
        """Stop listening. Says nothing about what the other side goes on doing."""
        if self._link.forget(self.id):
            self.send_frame(FrameType.ABANDON, b"")
        self.answer.cancel()


class Incoming(_Side):
    """A call made to us. `on_frame` receives its later frames; set it before the first await."""

    def __init__(self, link: Link, id_: int, payload: bytes) -> None:
        super().__init__(link, id_)
        self.payload = payload
        self.on_frame: FrameSink = ignore_frame
        self.task: asyncio.Task[None] | None = None

    def event(self, value: object) -> None:
        self.send_frame(FrameType.EVENT, pack(value))


Handler = Callable[[Incoming], Awaitable[bytes]]


class Link:
    """One connection. All methods belong to the event loop's thread."""

    def __init__(self, write: Callable[[bytes], None], handler: Handler | None = None, *, dialled: bool) -> None:
        """`dialled`: this side opened the connection. It numbers its calls odd, the other side even."""
        self._write = write
        self._handler = handler
        self._reader = FrameReader()
        self._parity = int(dialled)
        self._ids = itertools.count(1 if dialled else 2, 2)
        self._calls: dict[int, Call] = {}
        self._incoming: dict[int, Incoming] = {}
        self.lost: BarchanError | None = None

    def send(self, data: bytes) -> None:
        if self.lost is None:
            self._write(data)

    def call(self, payload: bytes, on_frame: FrameSink = ignore_frame) -> Call:
        """Send a CALL. When the link is already lost, the answer has failed."""
        call = Call(self, next(self._ids), on_frame)
        if self.lost is not None:
            call.answer.set_exception(self.lost)
            return call
        self._calls[call.id] = call
        self._write(encode(FrameType.CALL, call.id, payload))
        return call

    def forget(self, id_: int) -> bool:
        return self._calls.pop(id_, None) is not None

    def feed(self, data: bytes | memoryview) -> None:
        """Take received bytes. Raises `ProtocolError` when the peer breaks the protocol."""
        for frame in self._reader.feed(data):
            if frame.type == FrameType.CALL:
                self._begin(frame)
            elif frame.type in _ENDS:
                self._end(frame)
            elif frame.type == FrameType.ABANDON:
                self._abandoned(frame.id)
            elif frame.type in _STREAMS:
                self._stream(frame)
            else:
                raise ProtocolError(f"frame type {frame.type:#x} does not belong on this link")

    def close(self, error: BarchanError | None = None) -> None:
        """The connection is gone: outgoing calls fail with `error`, incoming ones are cancelled."""
        if self.lost is not None:
            return
        self.lost = error or ApiUnavailable("connection lost")
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(self.lost)
        incoming, self._incoming = self._incoming, {}
        for one in incoming.values():
            if one.task is not None:
                one.task.cancel()

    def _stream(self, frame: Frame) -> None:
        ours = frame.id % 2 == self._parity
        target = self._calls.get(frame.id) if ours else self._incoming.get(frame.id)
        if target is not None:
            target.on_frame(frame)

    def _begin(self, frame: Frame) -> None:
        if self._handler is None or frame.id in self._incoming or frame.id % 2 == self._parity:
            raise ProtocolError("unexpected CALL")
        incoming = Incoming(self, frame.id, frame.payload)
        self._incoming[frame.id] = incoming
        incoming.task = asyncio.get_running_loop().create_task(self._run(self._handler, incoming))

    async def _run(self, handler: Handler, incoming: Incoming) -> None:
        try:
            reply = await handler(incoming)
            incoming.send_frame(FrameType.REPLY, reply)
        except BarchanError as error:
            incoming.send_frame(FrameType.ERROR, pack(error.body()))
        except Exception as error:
            logger.exception("call failed")
            incoming.send_frame(FrameType.ERROR, pack(InternalError(f"{type(error).__name__}: {error}").body()))
        finally:
            self._incoming.pop(incoming.id, None)

    def _end(self, frame: Frame) -> None:
        call = self._calls.pop(frame.id, None)
        if call is None or call.answer.done():
            return
        if frame.type == FrameType.REPLY:
            call.answer.set_result(frame.payload)
        else:
            call.answer.set_exception(from_body(unpack(frame.payload, ErrorBody)))

    def _abandoned(self, id_: int) -> None:
        incoming = self._incoming.pop(id_, None)
        if incoming is not None and incoming.task is not None:
            incoming.task.cancel()
