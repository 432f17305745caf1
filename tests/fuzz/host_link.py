"""What the other end of a client or node link sends, in WebSocket messages or bare. Input: u8 manners, u8 dice for the cuts, then the stream.

`check` raises when a link lets anything but `ProtocolError` out, leaves a call without an answer after its end, keeps more
than its credit, or sends what is no frame.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from barchan.errors import BarchanError, InvalidRequest, ProtocolError
from barchan.wire import messages
from barchan.wire.frames import MAX_PAYLOAD, STDERR, STDOUT
from barchan.wire.link import Call, Incoming, Link
from barchan.wire.streams import WINDOW, CallStreams, Taking
from barchan.wire.websocket import Decoder, Opcode
from tests.fuzz.host_guest import cut, frames_of

logging.getLogger("barchan.wire.link").setLevel(logging.CRITICAL)
_loop = asyncio.new_event_loop()


class Peer:
    """One end with three calls under way: streams to be read, streams to be dropped, none."""

    def __init__(self, manners: int) -> None:
        self.sent = bytearray()
        self.unexpected: list[Exception] = []
        handler = self._handle if manners & 2 else None
        self.link = Link(self._write, handler, dialled=bool(manners & 1))
        self.streams = [
            CallStreams(outputs=(STDOUT, STDERR), taking=Taking.BUFFER, confirmed=bool(manners & 4)),
            CallStreams(taking=Taking.PREFIX),
        ]
        self.calls = [self._call(streams) for streams in self.streams]
        self.calls.append(self.link.call(messages.pack_call(messages.ListNodes())))

    def _write(self, *parts: bytes) -> None:
        self.sent += b"".join(parts)

    def _call(self, streams: CallStreams) -> Call:
        call = self.link.call(b"", streams.on_frame)
        streams.follow(call)
        streams.stdin.resume(0)
        streams.stdin.eof()
        return call

    async def _handle(self, call: Incoming) -> bytes:
        try:
            request = messages.unpack_call(call.payload)
        except InvalidRequest:
            raise
        except Exception as error:
            self.unexpected.append(error)
            raise
        again = messages.unpack_call(messages.pack_call(request))
        assert again == request
        await asyncio.sleep(0)
        streams = CallStreams()
        call.on_frame = streams.on_frame
        return messages.pack(None)

    def check_bounds(self) -> None:
        for streams in self.streams:
            for receiver in (streams.stdout, streams.stderr):
                kept = sum(map(len, receiver._chunks))  # what reading would have to show
                assert kept <= WINDOW, f"{kept} bytes kept"


def unframed(pieces: Iterable[bytes], masked: bool) -> Iterator[bytes]:
    """What WebSocket messages hold, each as it comes."""
    decoder = Decoder(masked=masked)
    for piece in pieces:
        for opcode, part in decoder.feed(piece):
            assert opcode == Opcode.BINARY or len(part) <= 125
            if opcode == Opcode.BINARY:
                yield bytes(part)


def stream_of(pieces: Iterable[bytes], masked: bool) -> tuple[bytes, bool]:
    """The whole stream, and whether the framing turned out malformed."""
    stream = bytearray()
    try:
        for part in unframed(pieces, masked):
            stream += part
    except ProtocolError:
        return bytes(stream), True
    return bytes(stream), False


async def converse(data: bytes, manners: int, dice: int) -> None:
    peer = Peer(manners)
    fault: BarchanError | None = None
    pieces: Iterable[bytes] = cut(data, dice) if dice else (data,)
    if manners & 8:
        masked = not manners & 1
        assert stream_of((data,), masked) == stream_of(cut(data, dice | 1), masked)
        pieces = unframed(pieces, masked)
    try:
        for piece in pieces:
            peer.link.feed(piece)
            peer.check_bounds()
            await asyncio.sleep(0)
    except ProtocolError as error:
        fault = error
    await asyncio.sleep(0)
    peer.link.close(fault)
    await asyncio.sleep(0)
    assert not peer.unexpected, peer.unexpected
    assert all(call.answer.done() for call in peer.calls)
    frames, malformed = frames_of(bytes(peer.sent), 0)
    assert not malformed and all(len(frame.payload) <= MAX_PAYLOAD for frame in frames)
    for call in peer.calls:
        decode_answer(call)


def decode_answer(call: Call) -> None:
    """As the SDK does with what a call brought."""
    if call.answer.cancelled() or call.answer.exception() is not None:
        assert isinstance(call.answer.exception(), BarchanError)
        return
    for request in (
        messages.GetSandbox,
        messages.ListExecs,
        messages.StatFile,
        messages.NodeStatus,
        messages.StartExec,
    ):
        try:
            messages.unpack(call.answer.result(), request.answer)
        except ProtocolError:
            continue


def check(data: bytes) -> None:
    if len(data) >= 2:
        _loop.run_until_complete(converse(data[2:], data[0], data[1]))
