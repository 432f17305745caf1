# Generated from src/barchan/wire/link.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Calls multiplexed over one connection, either way: client ↔ API and API ↔ node.

A call is a CALL frame with a fresh id, then frames with that id both ways, ended by REPLY or ERROR from the side that was
called, or by ABANDON from the caller. The connection itself is somebody else's: give `Link` a `write` function, feed it
what arrives, tell it when the connection is lost. `wire.transports` does that.

    caller:   call = link.call(pack_call(request), on_frame);  answer = call.answer.wait()
    called:   def handler(call: Incoming) -> bytes: …    # the REPLY payload; a BarchanError becomes ERROR

Flow control is per stream (CREDIT frames), so a link never needs to pause as a whole.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

from barchan.errors import (
    ApiUnavailable,
    BarchanError,
    ErrorBody,
    InternalError,
    InvalidRequest,
    ProtocolError,
    from_body,
)
from barchan.sdk._sync._futures import Future, Task, new_future, start
from barchan.wire.frames import (
    HEAD,
    MAX_PAYLOAD,
    Frame,
    FrameReader,
    FrameType,
    Payload,
    data_head,
    encode,
    encode_credit,
    encode_data,
    encode_eof,
)
from barchan.wire.messages import pack, unpack

logger = logging.getLogger(__name__)
FrameSink = Callable[[Frame], None]
_EARLY = 64
JOINED = 32 << 10
"""Smaller ones are copied together, which costs less than a vector."""
_STREAMS = (FrameType.DATA, FrameType.EOF, FrameType.CREDIT, FrameType.EVENT)
_ENDS = (FrameType.REPLY, FrameType.ERROR)


def ignore_frame(frame: Frame) -> None:
    """The sink of a call that has no streams."""


class Answered(Exception):
    """A handler raises it to end a call with an ERROR payload that came from elsewhere, unchanged."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("answered elsewhere")
        self.payload = payload


class _Side:
    """What both ends of a call can send."""

    def __init__(self, link: Link, id_: int) -> None:
        self.id = id_
        self._link = link

    def send_frame(self, type_: int, payload: Payload, stream: int = 0) -> None:
        if len(payload) < JOINED:
            self._link.send(encode(type_, self.id, payload, stream))
        else:
            self._link.send(HEAD.pack(len(payload), type_, stream, 0, self.id), payload)

    def send_data(self, stream: int, offset: int, data: Payload) -> None:
        if len(data) < JOINED:
            self._link.send(encode_data(self.id, stream, offset, data))
        else:
            self._link.send(data_head(self.id, stream, offset, len(data)), data)

    def send_eof(self, stream: int, total: int, dropped: int = 0) -> None:
        self._link.send(encode_eof(self.id, stream, total, dropped))

    def credit(self, stream: int, limit: int) -> None:
        self._link.send(encode_credit(self.id, stream, limit))


class Call(_Side):
    """An outgoing call. `answer` resolves to the REPLY payload or raises."""

    def __init__(self, link: Link, id_: int, on_frame: FrameSink) -> None:
        super().__init__(link, id_)
        self.on_frame = on_frame
        self.answer: Future[bytes] = new_future()
        self.refusal = b""
        """The ERROR payload as it came, for relays."""

    def abandon(self) -> None:
        """Stop listening. Says nothing about what the other side goes on doing."""
        if self._link.forget(self.id):
            self.send_frame(FrameType.ABANDON, b"")
        self.answer.cancel()

    def drop(self, error: BarchanError) -> None:
        """Stop listening because of a fault of the other side; whoever waits for the answer gets `error`."""
        if self._link.forget(self.id):
            self.send_frame(FrameType.ABANDON, b"")
        self.fail(error)

    def fail(self, error: BarchanError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # a call that nobody waits for any more is no fault

    def end(self, frame: Frame) -> None:
        """A REPLY or ERROR frame came."""
        if frame.type == FrameType.ERROR:
            self.refusal = bytes(frame.payload)
            self.fail(from_body(unpack(frame.payload, ErrorBody)))
        elif not self.answer.done():
            self.answer.set_result(bytes(frame.payload))


class Incoming(_Side):
    """A call made to us. Frames that come before the handler set `on_frame` are kept for it."""

    def __init__(self, link: Link, id_: int, payload: bytes) -> None:
        super().__init__(link, id_)
        self.payload = payload
        self.task: Task[None] | None = None
        self.abandoned = False
        self._early: list[Frame] = []
        self._on_frame: FrameSink | None = None

    @property
    def on_frame(self) -> FrameSink:
        return self._on_frame or self._keep

    @on_frame.setter
    def on_frame(self, sink: FrameSink) -> None:
        self._on_frame = sink
        early, self._early = self._early, []
        for frame in early:
            sink(frame)

    @property
    def link_lost(self) -> bool:
        """Whether the connection broke, as opposed to the caller giving up, maybe just before it hung up."""
        return self._link.lost is not None and not self.abandoned

    def event(self, value: object) -> None:
        self.send_frame(FrameType.EVENT, pack(value))

    def _keep(self, frame: Frame) -> None:
        # Only credit and end-of-file can come without credit of ours, so a handful is all an honest peer sends.
        if len(self._early) >= _EARLY:
            raise ProtocolError("frames without credit")
        self._early.append(frame)


Handler = Callable[[Incoming], bytes]


class Link:
    """One connection. All methods belong to the event loop's thread."""

    def __init__(self, write: Callable[..., None], handler: Handler | None = None, *, dialled: bool) -> None:
        """`write` takes the parts of one frame. `dialled`: this side opened the connection. It numbers its calls odd, the other side even."""
        self._write = write
        self._handler = handler
        self._reader = FrameReader()
        self._parity = int(dialled)
        self._ids = itertools.count(1 if dialled else 2, 2)
        self._calls: dict[int, Call] = {}
        self._incoming: dict[int, Incoming] = {}
        self.lost: BarchanError | None = None

    def send(self, *parts: Payload) -> None:
        """The parts of one frame."""
        if self.lost is None:
            self._write(*parts)

    def call(self, payload: bytes, on_frame: FrameSink = ignore_frame) -> Call:
        """Send a CALL. When the link is already lost, the answer has failed. `InvalidRequest` for one that fits no frame."""
        if len(payload) > MAX_PAYLOAD:
            raise InvalidRequest(f"a request of {len(payload)} bytes", hint=f"at most {MAX_PAYLOAD} bytes")
        call = Call(self, next(self._ids), on_frame)
        if self.lost is not None:
            call.fail(self.lost)
            return call
        self._calls[call.id] = call
        self._write(encode(FrameType.CALL, call.id, payload))
        return call

    def forget(self, id_: int) -> bool:
        return self._calls.pop(id_, None) is not None

    def room(self) -> memoryview:
        """Where to receive the next bytes, for `received`."""
        return self._reader.room()

    def received(self, view: memoryview, size: int) -> None:
        """`size` bytes are in a view that `room` gave. Raises `ProtocolError` when the peer breaks the protocol."""
        if self.lost is None:
            self._take(self._reader.received(view, size))

    def feed(self, data: Payload) -> None:
        """Take received bytes. Raises `ProtocolError` when the peer breaks the protocol.

        What comes after the link was closed is dropped: the frames before it may not have been taken to their end.
        """
        if self.lost is None:
            self._take(self._reader.feed(data))

    def _take(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            if self.lost is not None:
                return
            if frame.type in _STREAMS:
                self._stream(frame)
            elif frame.type == FrameType.CALL:
                self._begin(frame)
            elif frame.type in _ENDS:
                self._ended(frame)
            elif frame.type == FrameType.ABANDON:
                self._abandoned(frame.id)
            else:
                raise ProtocolError(f"frame type {frame.type:#x} does not belong on this link")

    def close(self, error: BarchanError | None = None) -> None:
        """The connection is gone: outgoing calls fail with `error`, incoming ones are cancelled."""
        if self.lost is not None:
            return
        self.lost = error or ApiUnavailable("connection lost")
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(self.lost)
        incoming, self._incoming = self._incoming, {}
        for one in incoming.values():
            if one.task is not None:
                one.task.cancel()

    def _stream(self, frame: Frame) -> None:
        if frame.id % 2 == self._parity:
            call = self._calls.get(frame.id)
            if call is not None:
                call.on_frame(frame)
        else:
            incoming = self._incoming.get(frame.id)
            if incoming is not None:
                self._deliver(incoming, frame)

    def _deliver(self, incoming: Incoming, frame: Frame) -> None:
        # A relay passes on what its clients send: the fault of one call must not cost the calls of others.
        try:
            incoming.on_frame(frame)
        except BarchanError as error:
            self._abandoned(incoming.id)
            incoming.send_frame(FrameType.ERROR, pack(error.body()))

    def _ended(self, frame: Frame) -> None:
        call = self._calls.get(frame.id)
        if call is not None:
            call.end(frame)  # a malformed one leaves the call to `close`, which fails it
            self._calls.pop(frame.id, None)

    def _begin(self, frame: Frame) -> None:
        if self._handler is None or frame.id in self._incoming or frame.id % 2 == self._parity:
            raise ProtocolError("unexpected CALL")
        incoming = Incoming(self, frame.id, bytes(frame.payload))
        self._incoming[frame.id] = incoming
        incoming.task = start(self._run, self._handler, incoming)

    def _run(self, handler: Handler, incoming: Incoming) -> None:
        try:
            type_, payload = FrameType.REPLY, handler(incoming)
        except Answered as answered:
            type_, payload = FrameType.ERROR, answered.payload
        except BarchanError as error:
            type_, payload = FrameType.ERROR, pack(error.body())
        except Exception as error:
            logger.exception("call failed")
            type_, payload = FrameType.ERROR, pack(InternalError(f"{type(error).__name__}: {error}").body())
        finally:
            still_wanted = self._incoming.pop(incoming.id, None) is incoming
        if still_wanted:
            incoming.send_frame(*_fitting(type_, payload))

    def _abandoned(self, id_: int) -> None:
        incoming = self._incoming.pop(id_, None)
        if incoming is not None:
            incoming.abandoned = True
            if incoming.task is not None:
                incoming.task.cancel()


def _fitting(type_: int, payload: bytes) -> tuple[int, bytes]:
    """An answer too large for a frame would cost the whole connection."""
    if len(payload) <= MAX_PAYLOAD:
        return type_, payload
    error = InternalError(f"the answer has {len(payload)} bytes", hint=f"at most {MAX_PAYLOAD} can be sent at once")
    return FrameType.ERROR, pack(error.body())
