"""A guest that says more than it was asked for costs its own connection, never the node's memory."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import cast

import pytest

from barchan.errors import BarchanError, ProtocolError
from barchan.node.channel import MOST_EARLY_BYTES, GuestChannel
from barchan.node.operation import Collector, Operation
from barchan.wire import guest
from barchan.wire.frames import (
    STDIN,
    STDOUT,
    U64,
    Frame,
    FrameReader,
    FrameType,
    encode,
    encode_data,
    encode_eof,
)

WELCOME = encode(FrameType.WELCOME, 0, struct.pack("<HHIQQ", 1, 0, 0, 77, 0))


class Transport:
    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True


class Connection:
    """A channel with one operation on it that reads at most 100 bytes."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.lost: list[Exception] = []
        self.channel = GuestChannel(lambda _channel, error: self.lost.append(error))
        self.channel.connection_made(cast(asyncio.Transport, self.transport))
        self.collector = Collector(1000)
        self.operation = Operation(b"/a", self.collector)

    def begin(self) -> None:
        self.operation.on_caller(Frame(FrameType.CREDIT, STDOUT, 0, U64.pack(100)))
        self.operation.begin(self.channel, 1, guest.start(1, guest.OpKind.READ, b""))
        self.channel.deliver()

    def receive(self, data: bytes) -> None:
        while data:
            room = self.channel.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.channel.buffer_updated(size)
            data = data[size:]

    def said(self) -> Iterator[Frame]:
        """What went to the guest."""
        return FrameReader().feed(self.transport.sent)


@pytest.mark.parametrize("early", [True, False])
async def test_output_without_credit_ends_the_connection(early: bool) -> None:
    at = Connection()
    flood = WELCOME + encode_data(1, STDOUT, 0, b"x" * 101)
    if early:
        at.receive(flood)
    at.begin()
    if not early:
        at.receive(flood)
    at.channel.connection_lost(None)
    assert at.transport.aborted and not at.collector.data
    assert isinstance(at.lost[0], ProtocolError)


async def test_output_with_a_gap_ends_the_connection() -> None:
    at = Connection()
    at.begin()
    at.receive(encode_data(1, STDOUT, 0, b"abc") + encode_data(1, STDOUT, 4, b"e"))
    assert at.transport.aborted and bytes(at.collector.data) == b"abc"


async def test_what_comes_before_anybody_listens_is_bounded_by_bytes() -> None:
    at = Connection()
    frame = encode(FrameType.DONE, 1, bytes(guest.MAX_FROM_GUEST))
    for _ in range(MOST_EARLY_BYTES // guest.MAX_FROM_GUEST):
        at.receive(frame)
    assert not at.transport.aborted
    at.receive(frame)
    assert at.transport.aborted


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameType.CREDIT, STDOUT, 0, b"odd"),
        Frame(FrameType.EOF, STDIN, 0, encode_eof(0, STDIN, 5)[16:]),
        Frame(FrameType.DATA, STDIN, 0, encode_data(0, STDIN, 1, b"gap")[16:]),
        Frame(FrameType.DATA, STDIN, 0, encode_data(0, STDIN, 0, bytes(guest.INPUT_WINDOW + 1))[16:]),
    ],
    ids=["credit", "eof", "gap", "too much"],
)
async def test_a_caller_out_of_turn_never_reaches_the_guest(frame: Frame) -> None:
    at = Connection()
    at.begin()
    await asyncio.sleep(0)
    before = len(list(at.said()))
    with pytest.raises(ProtocolError):
        at.operation.on_caller(frame)
    await asyncio.sleep(0)
    assert len(list(at.said())) == before


async def test_a_caller_out_of_turn_from_the_start_fails_its_own_operation() -> None:
    at = Connection()
    at.operation.on_caller(Frame(FrameType.CREDIT, STDOUT, 0, b"odd"))
    at.begin()
    with pytest.raises(BarchanError):
        await at.operation.detail
    await asyncio.sleep(0)
    assert [frame.type for frame in at.said()][-1] == FrameType.CANCEL
