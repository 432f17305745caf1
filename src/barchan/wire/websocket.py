"""WebSocket framing (RFC 6455, section 5) around a byte stream: bytes in, pieces out, no I/O.

Both ends only use binary messages, and where one ends means nothing to them. So nothing is kept until a message is whole,
and nothing needs to be copied together: a message's bytes are handed on as they come.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from barchan.errors import ProtocolError
from barchan.wire.frames import Payload

_FIN, _RESERVED, _MASKED = 0x80, 0x70, 0x80
_SHORT, _LONG = struct.Struct(">BBH"), struct.Struct(">BBQ")
_MOST_CONTROL = 125


_ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, section 1.3."""


class Opcode(IntEnum):
    CONT = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002


class Piece(NamedTuple):
    """Bytes of a binary message, or a control frame with all of its payload."""

    opcode: int
    data: Payload


def head(opcode: int, size: int, mask: bytes = b"") -> bytes:
    """What goes before `size` bytes, which the mask, if any, has been applied to."""
    first, masked = _FIN | opcode, _MASKED if mask else 0
    if size <= _MOST_CONTROL:
        return bytes((first, masked | size)) + mask
    if size < 1 << 16:
        return _SHORT.pack(first, masked | 126, size) + mask
    return _LONG.pack(first, masked | 127, size) + mask


def new_mask() -> bytes:
    return os.urandom(4)


def apply_mask(data: Payload, mask: bytes) -> bytes:
    """Applying it again undoes it."""
    size = len(data)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")).to_bytes(size, "little")


def close_payload(code: int, reason: str = "") -> bytes:
    return struct.pack(">H", code) + reason.encode()[: _MOST_CONTROL - 2]


def new_key() -> str:
    """Of a client's handshake."""
    return base64.b64encode(os.urandom(16)).decode()


def is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def accept_key(key: str) -> str:
    """What the server answers to a client's key."""
    return base64.b64encode(hashlib.sha1(key.encode() + _ACCEPT, usedforsecurity=False).digest()).decode()


class Decoder:
    """Cuts what arrives into pieces. `masked` says whether the other side masks: clients must, servers must not."""

    def __init__(self, *, masked: bool) -> None:
        self._masked = masked
        self._rest = b""
        """An incomplete head, or an incomplete control frame."""
        self._left = 0
        """Bytes of the present frame of a message that have not come."""
        self._mask = b""
        self._inside = False
        """Whether the message goes on after the present frame."""

    def feed(self, data: Payload) -> Iterator[Piece]:
        """Raises `ProtocolError`, after which the connection is of no further use."""
        if self._rest:
            data, self._rest = self._rest + bytes(data), b""
        view = memoryview(data)
        while view:
            if self._left:
                part, view = view[: self._left], view[self._left :]
                yield Piece(Opcode.BINARY, self._content(part))
                continue
            frame = _parsed(view)
            if frame is None:
                break
            self._check(frame)
            end = frame.length + frame.size
            if frame.opcode < Opcode.CLOSE:
                self._left, self._mask, self._inside = frame.size, frame.mask, not frame.final
                view = view[frame.length :]
            elif len(view) >= end:
                yield Piece(frame.opcode, _unmasked(view[frame.length : end], frame.mask))
                view = view[end:]
            else:
                break
        self._rest = bytes(view)

    def _content(self, part: memoryview) -> Payload:
        self._left -= len(part)
        if not self._mask:
            return part
        mask, turn = self._mask, len(part) % 4
        self._mask = mask[turn:] + mask[:turn]
        return apply_mask(part, mask)

    def _check(self, frame: _Head) -> None:
        if bool(frame.mask) != self._masked:
            raise ProtocolError(f"a WebSocket frame {'with' if frame.mask else 'without'} a mask")
        if frame.opcode >= Opcode.CLOSE:
            if frame.size > _MOST_CONTROL or not frame.final or frame.opcode > Opcode.PONG:
                raise ProtocolError(f"a WebSocket control frame {frame.opcode:#x} of {frame.size} bytes")
        elif frame.opcode != (Opcode.CONT if self._inside else Opcode.BINARY):
            raise ProtocolError(f"a WebSocket frame of type {frame.opcode:#x}: only binary messages are understood")


class _Head(NamedTuple):
    opcode: int
    final: bool
    size: int
    mask: bytes
    length: int
    """Of the head itself."""


def _parsed(view: memoryview) -> _Head | None:
    """None when it is incomplete."""
    if len(view) < 2:
        return None
    first, second = view[0], view[1]
    if first & _RESERVED:
        raise ProtocolError("a WebSocket frame with an extension that nobody asked for")
    size, length = second & 0x7F, 2
    if size >= 126:
        length = 4 if size == 126 else 10
        size = int.from_bytes(view[2:length], "big")
    mask = b""
    if second & _MASKED:
        mask, length = bytes(view[length : length + 4]), length + 4
    return _Head(first & 0x0F, bool(first & _FIN), size, mask, length) if len(view) >= length else None


def _unmasked(data: memoryview, mask: bytes) -> bytes:
    return apply_mask(data, mask) if mask else bytes(data)
