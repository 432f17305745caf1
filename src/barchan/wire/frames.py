"""Frames: the one framing on every ordered byte stream of barchan (guest link, node link, client link).

    u32 length | u8 type | u8 stream | u16 zero | u64 id | payload          little-endian, 16-byte head

`length` counts the payload alone and is at most MAX_PAYLOAD. `id` names an operation (guest link) or a call (other
links). DATA, EOF and CREDIT mean the same everywhere, in both directions, so that a relay forwards them by
changing only the id:

    DATA    u64 offset of the first byte, bytes
    EOF     u64 total bytes of the stream, u64 how many of them were dropped
    CREDIT  u64 offset up to which the receiver of the stream takes bytes (absolute, so repeating is harmless)

Bytes in, frames out: nothing here does I/O. Input from a sandbox is hostile; a malformed head raises
`ProtocolError` and the connection is of no further use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from barchan.errors import ProtocolError

HEAD = struct.Struct("<IBBHQ")
_DATA_HEAD = struct.Struct("<IBBHQQ")
U64 = struct.Struct("<Q")
TWO_U64 = struct.Struct("<QQ")
MAX_PAYLOAD = (2 << 20) + 64
"""All arguments and variables that the kernel gives a program fit one frame."""
CHUNK = 128 << 10
"""The most bytes the host's senders put in one DATA frame; a guest's may be larger."""

STDIN, STDOUT, STDERR = 0, 1, 2
Payload = bytes | bytearray | memoryview
"""Of a frame. DATA may lie in what was received; nobody writes to it any more."""


class FrameType(IntEnum):
    """0x01–0x3f are shared with the guest (native/frames.h), 0x40–0x7f belong to the other links."""

    HELLO = 0x01
    START = 0x02
    DATA = 0x03
    EOF = 0x04
    CREDIT = 0x05
    ACK = 0x06
    SIGNAL = 0x07
    FORGET = 0x08
    PING = 0x09
    CANCEL = 0x0A
    RESIZE = 0x0B
    WELCOME = 0x11
    STARTED = 0x12
    DONE = 0x16
    REFUSED = 0x17
    PONG = 0x19

    CALL = 0x41
    REPLY = 0x42
    ERROR = 0x43
    EVENT = 0x44
    ABANDON = 0x45


class Frame(NamedTuple):
    type: int
    stream: int
    id: int
    payload: Payload


def encode(type_: int, id_: int, payload: Payload = b"", stream: int = 0) -> bytes:
    return HEAD.pack(len(payload), type_, stream, 0, id_) + payload


def encode_data(id_: int, stream: int, offset: int, data: Payload) -> bytes:
    return b"".join((data_head(id_, stream, offset, len(data)), data))


def data_head(id_: int, stream: int, offset: int, size: int) -> bytes:
    """What goes before `size` bytes of a DATA frame, for those who send the two without joining them."""
    return _DATA_HEAD.pack(size + 8, FrameType.DATA, stream, 0, id_, offset)


def encode_eof(id_: int, stream: int, total: int, dropped: int = 0) -> bytes:
    return HEAD.pack(16, FrameType.EOF, stream, 0, id_) + TWO_U64.pack(total, dropped)


def encode_credit(id_: int, stream: int, limit: int) -> bytes:
    return HEAD.pack(8, FrameType.CREDIT, stream, 0, id_) + U64.pack(limit)


def decode_data(payload: Payload) -> tuple[int, memoryview]:
    """The offset and the bytes, where they are."""
    if len(payload) < 8:
        raise ProtocolError("DATA frame shorter than its offset")
    return U64.unpack_from(payload)[0], memoryview(payload)[8:]


def decode_u64(payload: Payload) -> int:
    if len(payload) != 8:
        raise ProtocolError("frame payload is not one 64-bit number")
    return int(U64.unpack(payload)[0])


def decode_eof(payload: Payload) -> tuple[int, int]:
    if len(payload) != 16:
        raise ProtocolError("EOF frame is not two 64-bit numbers")
    total, dropped = TWO_U64.unpack(payload)
    if dropped > total:
        raise ProtocolError("EOF frame: more dropped than produced")
    return total, dropped


def coalesce(frames: Iterable[Frame], most: int = 2 * CHUNK) -> Iterator[Frame]:
    """The same frames, with runs of contiguous DATA of one stream joined into frames of up to `most` bytes.

    A receiver that falls behind finds many small frames at once; what it does next costs per frame.
    """
    run: list[Payload] = []
    first = Frame(0, 0, 0, b"")
    size = 0
    for frame in frames:
        if run and _continues(frame, first, size) and size + len(frame.payload) - 8 <= most:
            run.append(memoryview(frame.payload)[8:])
            size += len(frame.payload) - 8
            continue
        if run:
            yield _joined(first, run)
            run = []
        if frame.type == FrameType.DATA and len(frame.payload) > 8:
            first, run, size = frame, [frame.payload], len(frame.payload) - 8
        else:
            yield frame
    if run:
        yield _joined(first, run)


def _continues(frame: Frame, first: Frame, size: int) -> bool:
    if frame.type != FrameType.DATA or frame.id != first.id or frame.stream != first.stream or len(frame.payload) < 8:
        return False
    return bool(U64.unpack_from(frame.payload)[0] == U64.unpack_from(first.payload)[0] + size)


def _joined(first: Frame, run: list[Payload]) -> Frame:
    return first if len(run) == 1 else first._replace(payload=b"".join(run))


class FrameReader:
    """Cuts a byte stream into frames, with as little copying as can be.

    Either feed it what arrived, or receive into `room()` and say how much with `received`. Both yield what is complete and
    keep the rest. The rest of a large frame is received where it stays.
    """

    def __init__(self, max_payload: int = MAX_PAYLOAD) -> None:
        self._max = max_payload
        self._rest = b""
        """Less than a head."""
        self._head = Frame(0, 0, 0, b"")
        self._payload: bytearray | None = None
        """Of the incomplete frame that `_head` begins, `_have` bytes of it received."""
        self._have = 0

    def room(self) -> memoryview:
        """Where to receive the next bytes: in the incomplete frame, or in a buffer that all readers of the thread share."""
        if self._payload is not None and len(self._payload) - self._have >= _DIRECT:
            return memoryview(self._payload)[self._have :]
        return _shared

    def received(self, view: memoryview, size: int) -> Iterator[Frame]:
        """`size` bytes were received into `view`, which came from `room`."""
        if view is _shared:
            return self.feed(bytes(view[:size]))
        return self._advance(size)

    def feed(self, data: Payload) -> Iterator[Frame]:
        at = 0
        if self._payload is not None:
            at = self._fill(data)
            yield from self._advance(at)
        if self._rest:
            data, at, self._rest = self._rest + bytes(memoryview(data)[at:]), 0, b""
        view, have = memoryview(data), len(data)
        while have - at >= HEAD.size:
            length, type_, stream, zero, id_ = HEAD.unpack_from(view, at)
            if length > self._max or zero:
                raise ProtocolError(f"bad frame head: length {length}, reserved {zero}")
            at += HEAD.size
            if length > have - at:
                self._begin(Frame(type_, stream, id_, b""), length, view[at:])
                return
            payload = view[at : at + length]
            yield Frame(type_, stream, id_, payload if type_ == FrameType.DATA else bytes(payload))
            at += length
        self._rest = bytes(view[at:])

    def _begin(self, head: Frame, length: int, first: memoryview) -> None:
        self._head, self._payload, self._have = head, bytearray(length), len(first)
        self._payload[: len(first)] = first

    def _fill(self, data: Payload) -> int:
        """Move what belongs to the incomplete frame into it. Returns how many bytes that are."""
        assert self._payload is not None
        size = min(len(data), len(self._payload) - self._have)
        self._payload[self._have : self._have + size] = memoryview(data)[:size]
        return size

    def _advance(self, size: int) -> Iterator[Frame]:
        assert self._payload is not None
        self._have += size
        if self._have == len(self._payload):
            payload, self._payload = self._payload, None
            yield self._head._replace(payload=payload if self._head.type == FrameType.DATA else bytes(payload))

    @property
    def pending(self) -> int:
        """Bytes kept of an incomplete frame."""
        return len(self._rest) if self._payload is None else HEAD.size + self._have


_DIRECT = 4096
_shared = memoryview(bytearray(256 << 10))
