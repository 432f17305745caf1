"""What a hostile guest sends to the node. Input: u8 which, u8 dice for the cuts, then bytes of that kind.

`check` raises when anything but the errors that callers expect comes out, when pieces decode to something else than the whole,
or when more is kept than was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

from barchan.errors import ProtocolError
from barchan.node.channel import MOST_EARLY_BYTES, GuestChannel
from barchan.node.operation import Collector, Operation
from barchan.sdk._tree import MAX_PIECE, TreeReader, parts_of
from barchan.spec import FileStat
from barchan.wire import guest
from barchan.wire.frames import STDOUT, U64, Frame, FrameReader, FrameType, coalesce, encode

MOST = 1 << 16
"""Credit and bound of the operation that reads."""
_loop = asyncio.new_event_loop()


def cut(data: bytes, dice: int) -> Iterator[bytes]:
    """Pieces of sizes that the dice give; 0 leaves it whole."""
    while data:
        dice = (dice * 1103515245 + 12345) & 0x7FFFFFFF
        size = 1 + (dice >> 16) % 60 if dice else len(data)
        yield data[:size]
        data = data[size:]


def receive(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """As an event loop does it."""
    while data:
        room = protocol.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


def decoded(make: Callable[[], list[object]]) -> object:
    try:
        return make()
    except ProtocolError:
        return ProtocolError


def frames_of(data: bytes, dice: int) -> tuple[list[Frame], bool]:
    """The frames, and whether the stream turned out malformed."""
    reader, found = FrameReader(), []
    try:
        for piece in cut(data, dice) if dice else (data,):
            found += reader.feed(piece)
            assert reader.pending <= len(data)
    except ProtocolError:
        return found, True
    return found, False


def frames_received(data: bytes, dice: int) -> tuple[list[Frame], bool]:
    """The same by way of the reader's own room."""
    reader, found = FrameReader(), []
    try:
        for piece in cut(data, dice) if dice else (data,):
            while piece:
                room = reader.room()
                size = min(len(room), len(piece))
                room[:size] = piece[:size]
                piece = piece[size:]
                found += reader.received(room, size)
    except ProtocolError:
        return found, True
    return found, False


def check_frames(data: bytes, dice: int) -> None:
    whole, bad = frames_of(data, 0)
    for pieces, bad_too in (frames_of(data, dice | 1), frames_received(data, dice)):
        assert bad == bad_too
        assert bad or whole == pieces
    joined = list(coalesce(whole, most=64))
    assert sum(len(frame.payload) for frame in joined) <= sum(len(frame.payload) for frame in whole)
    assert (
        b"".join(encode(f.type, f.id, f.payload, f.stream) for f in whole)
        == data[: sum(16 + len(f.payload) for f in whole)]
    )


def check_entries(data: bytes, dice: int) -> None:
    def entries() -> list[object]:
        cursor, found = guest.Cursor(data), []
        while cursor.left:
            entry = guest.read_entry(cursor)
            assert isinstance(guest.stat_of(entry, entry.path), FileStat)
            assert guest.read_entry(guest.Cursor(guest.encode_entry(entry))) == entry
            found.append(entry)
        return found

    decoded(entries)


def check_processes(data: bytes, dice: int) -> None:
    def processes() -> list[object]:
        cursor, found = guest.Cursor(data), []
        while cursor.left:
            found.append(guest.read_process(cursor))
            assert sum(map(len, found[-1].argv)) <= len(data)
        return found

    decoded(processes)


def check_tree(data: bytes, dice: int) -> None:
    def tree(dice: int) -> list[object]:
        reader, found = TreeReader(), []
        for piece in cut(data, dice) if dice else (data,):
            for item in reader.feed(piece):
                assert len(item) <= MAX_PIECE
                if isinstance(item, guest.Entry):
                    assert b".." not in parts_of(item.path) and b"" not in parts_of(item.path)
                found.append(item)
        reader.end()
        return found

    assert decoded(lambda: tree(0)) == decoded(lambda: tree(dice | 1))


class Transport:
    """Keeps what the node sends."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def check_channel(data: bytes, dice: int) -> None:
    _loop.run_until_complete(converse(data, dice))


async def converse(data: bytes, dice: int) -> None:
    """A connection from its first byte, with an operation on it that reads."""
    transport, lost = Transport(), []
    channel = GuestChannel(lambda _channel, error: lost.append(error))
    channel.connection_made(cast(asyncio.Transport, transport))
    collector = Collector(MOST)
    operation = Operation(b"/a", collector)
    for number, piece in enumerate(cut(data, dice) if dice else (data,)):
        if transport.aborted:
            break
        if number == dice % 5:
            operation.on_caller(Frame(FrameType.CREDIT, STDOUT, 0, U64.pack(MOST)))
            operation.begin(channel, 1, guest.start(1, guest.OpKind.READ, b""))
            channel.deliver()
        receive(channel, piece)
        assert channel.early_bytes <= MOST_EARLY_BYTES
        assert len(collector.data) <= MOST
        await asyncio.sleep(0)
    channel.connection_lost(None)
    assert channel.greeted.done() and lost
    assert not frames_of(bytes(transport.sent), 0)[1]


CHECKS = (check_channel, check_frames, check_entries, check_processes, check_tree)


def check(data: bytes) -> None:
    if len(data) >= 2:
        CHECKS[data[0] % len(CHECKS)](data[2:], data[1])
