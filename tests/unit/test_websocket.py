from __future__ import annotations

import asyncio
import itertools
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.protocol import OPEN, State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError
from barchan.wire import transports
from barchan.wire.frames import FrameReader, FrameType, Payload, encode
from barchan.wire.link import Incoming
from barchan.wire.transports import MESSAGE, WebSocketLink
from barchan.wire.websocket import CloseCode, Decoder, Opcode, Piece, accept_key, apply_mask, head, is_key, new_key

MASK = b"\x01\x80\xff\x00"
SIZES = st.sampled_from([0, 1, 3, 125, 126, 127, 65535, 65536, 70000])


def message(data: bytes, mask: bytes = b"", opcode: int = Opcode.BINARY) -> bytes:
    return head(opcode, len(data), mask) + (apply_mask(data, mask) if mask else data)


def content(pieces: list[Piece]) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The stream of all binary messages, and the control frames."""
    stream = b"".join(piece.data for piece in pieces if piece.opcode == Opcode.BINARY)
    return stream, [(piece.opcode, bytes(piece.data)) for piece in pieces if piece.opcode != Opcode.BINARY]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(sizes=st.lists(SIZES, max_size=4), places=st.lists(st.integers(0, 1 << 20), max_size=8), masked=st.booleans())
def test_a_stream_survives_any_cut(sizes: list[int], places: list[int], masked: bool) -> None:
    mask = MASK if masked else b""
    bodies = [bytes(i % 251 for i in range(size)) for size in sizes]
    sent = b"".join(message(body, mask) + message(b"p%d" % len(body), mask, Opcode.PING) for body in bodies)
    decoder = Decoder(masked=masked)
    pieces = [piece for part in cut(sent, places) for piece in decoder.feed(part)]
    stream, controls = content(pieces)
    assert stream == b"".join(bodies)
    assert controls == [(Opcode.PING, b"p%d" % len(body)) for body in bodies]


@given(st.binary(max_size=300), st.binary(min_size=4, max_size=4))
def test_a_mask_is_that_of_the_standard(data: bytes, mask: bytes) -> None:
    masked = apply_mask(data, mask)
    assert masked == bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
    assert apply_mask(masked, mask) == data


def test_a_message_may_be_fragmented_around_control_frames() -> None:
    sent = bytes((0x02, 2)) + b"ab" + message(b"?", opcode=Opcode.PING) + bytes((0x80, 1)) + b"c" + message(b"d")
    stream, controls = content(list(Decoder(masked=False).feed(sent)))
    assert (stream, controls) == (b"abcd", [(Opcode.PING, b"?")])


@pytest.mark.parametrize(
    ("sent", "masked"),
    [
        (message(b"x"), True),
        (message(b"x", MASK), False),
        (message(b"x", opcode=Opcode.TEXT), False),
        (message(b"x", opcode=Opcode.CONT), False),
        (bytes((0x02, 0)) + message(b"x"), False),
        (bytes((0xC2, 1)) + b"x", False),
        (bytes((0x09, 0)), False),
        (head(Opcode.PING, 126), False),
        (message(b"", opcode=11), False),
    ],
    ids=["no-mask", "mask", "text", "cont", "not-continued", "extension", "ping-in-parts", "long-ping", "unknown"],
)
def test_what_breaks_the_protocol_is_refused(sent: bytes, masked: bool) -> None:
    with pytest.raises(ProtocolError):
        list(Decoder(masked=masked).feed(sent))


def opened() -> tuple[ClientProtocol, ServerProtocol]:
    """Another implementation's two ends, past their handshake."""
    return ClientProtocol(parse_uri("ws://host/"), state=OPEN), ServerProtocol(state=OPEN)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_both_ends_of_another_implementation_understand_us(size: int) -> None:
    client, server = opened()
    data = bytes(size)
    client.receive_data(message(data))
    server.receive_data(message(data, MASK))
    for end in (client, server):
        (event,) = end.events_received()
        assert isinstance(event, Frame) and event.data == data
        assert end.state is State.OPEN


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_we_understand_both_ends_of_another_implementation(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    for end, masked in zip(opened(), (True, False), strict=True):
        end.send_binary(data)
        end.send_ping(b"alive?")
        sent = b"".join(end.data_to_send())
        assert content(list(Decoder(masked=masked).feed(sent))) == (data, [(Opcode.PING, b"alive?")])


def test_the_handshake_is_that_of_the_standard() -> None:
    assert accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert is_key(new_key()) and not is_key("") and not is_key("AAAA") and not is_key("&" * 24)


class Wire(asyncio.Transport):
    """Keeps what is written, one entry a system call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.ended = ""
        self.unsent = 0

    def write(self, data: Payload) -> None:
        self.calls.append(bytes(data))

    def writelines(self, list_of_data: object) -> None:
        self.calls.append(b"".join(cast(list[bytes], list_of_data)))

    def is_closing(self) -> bool:
        return bool(self.ended)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def said(self, *, masked: bool) -> tuple[bytes, list[tuple[int, bytes]]]:
        return content(list(Decoder(masked=masked).feed(b"".join(self.calls))))


def lost() -> BarchanError:
    return ApiUnavailable("gone")


def client() -> tuple[WebSocketLink, Wire]:
    wire = Wire()
    return WebSocketLink(wire, None, dialled=True, lost=lost), wire


def server() -> tuple[WebSocketLink, Wire]:
    async def handler(call: Incoming) -> bytes:
        return call.payload

    wire = Wire()
    return WebSocketLink(wire, handler, dialled=False, lost=lost), wire


async def turn() -> None:
    await asyncio.sleep(0)


async def test_a_client_sends_at_once_and_gathers_the_rest_of_the_turn() -> None:
    link, wire = client()
    for _ in range(10):
        link.link.call(b"x")
    assert len(wire.calls) == 1
    await turn()
    assert len(wire.calls) == 2
    frames = list(FrameReader().feed(wire.said(masked=True)[0]))
    assert [(frame.type, frame.id) for frame in frames] == [(FrameType.CALL, 2 * i + 1) for i in range(10)]


async def test_calls_cross_from_end_to_end() -> None:
    (ours, up), (theirs, down) = client(), server()
    call = ours.link.call(b"payload")
    theirs.feed_data(up.calls[0])
    while not down.calls:
        await turn()
    ours.feed_data(down.calls[0])
    assert await call.answer == b"payload"


async def test_messages_are_bounded() -> None:
    link, wire = server()
    link.link.send(bytes(16))
    parts = [bytes(600_000) for _ in range(8)]
    link.link.send(*parts)
    await turn()
    stream, _ = wire.said(masked=False)
    assert len(stream) == 16 + 8 * 600_000
    sizes, at = [], 0
    sent = b"".join(wire.calls)
    while at < len(sent):
        short = sent[at + 1] < 126
        size, length = (sent[at + 1], 2) if short else (int.from_bytes(sent[at + 2 : at + 10], "big"), 10)
        sizes.append(size)
        at += length + size
    assert len(sizes) > 2 and max(sizes) < 2 * MESSAGE


async def test_a_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "MAX_UNSENT", 100)
    link, wire = server()
    wire.unsent = 101
    link.link.send(b"x")
    assert wire.ended == "aborted"


async def test_a_ping_is_answered() -> None:
    link, wire = server()
    link.feed_data(message(b"alive?", MASK, Opcode.PING))
    assert wire.said(masked=False) == (b"", [(Opcode.PONG, b"alive?")])


async def test_the_end_is_said_and_answered_once() -> None:
    (ours, up), (theirs, down) = client(), server()
    ours.link.call(b"last words")
    ours.close(CloseCode.NORMAL, "done")
    ours.link.send(b"too late")
    for sent in up.calls:
        theirs.feed_data(sent)
    theirs.close()
    assert down.ended == "closed" and down.said(masked=False)[1] == [(Opcode.CLOSE, b"\x03\xe8")]
    ours.feed_data(down.calls[0])
    assert up.ended == "closed"
    stream, controls = up.said(masked=True)
    assert b"last words" in stream and b"too late" not in stream
    assert controls == [(Opcode.CLOSE, b"\x03\xe8done")]


async def test_a_broken_protocol_ends_the_connection_and_says_why() -> None:
    link, wire = client()
    call = link.link.call(b"x")
    link.feed_data(message(b"text", opcode=Opcode.TEXT))
    link.feed_data(message(encode(FrameType.REPLY, call.id)))
    with pytest.raises(ProtocolError, match="binary"):
        await call.answer
    assert wire.said(masked=True)[1][0][1][:2] == b"\x03\xea"


async def test_calls_fail_with_the_connection() -> None:
    link, _ = client()
    call = link.link.call(b"x")
    link.feed_eof()
    assert link.closed.is_set()
    with pytest.raises(ApiUnavailable, match="gone"):
        await call.answer


async def test_a_silent_peer_is_asked_and_then_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "SILENCE", 0.02)
    _, wire = client()
    while not wire.calls:
        await turn()
    assert wire.said(masked=True)[1] == [(Opcode.PING, b"")] and not wire.ended
    while not wire.ended:
        await turn()
    assert wire.ended == "aborted"


async def test_a_peer_that_answers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "SILENCE", 0.02)
    link, wire = client()
    for pings in (1, 2, 3):
        while len(wire.calls) < pings:
            await turn()
        link.feed_data(message(b"", opcode=Opcode.PONG))
    assert not wire.ended
