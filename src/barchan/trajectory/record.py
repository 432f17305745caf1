"""Records and the bytes they are stored as. The format is docs/reference/trajectory-format.md. Pure.

What is read may have been damaged, and holds bytes that a sandbox chose: every length is checked, and anything odd is
`LogCorrupt`. Check values are seeded with the segment's secret salt and the entry's place, so that neither a
moved entry nor one forged inside an output passes for a record.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from crc32c import crc32c

from barchan.errors import InvalidRequest, LogCorrupt
from barchan.packing import PackedLayer, PackOrder
from barchan.spec import MIB, Exec, ExecResult, SandboxSpec

MAX_PAYLOAD = 2 * MIB
MAGIC = b"BARCHAN1"
VERSION = 1

ENTRY = struct.Struct("<IIII")
_BULK = 1 << 16
"""Bytes of data that are not copied behind the rest of their record."""
_NO_DATA, _BIN32 = b"\xc4\x00", 0xC6
_DATA_HEAD = struct.Struct(">BI")
_PLACE = struct.Struct("<QQ")
_MARK = struct.Struct("<III")
_HEAD = struct.Struct("<8sHHIQI")
_HEAD_CRC = struct.Struct("<I")
HEAD_SIZE = _HEAD.size + _HEAD_CRC.size

Count = Annotated[int, msgspec.Meta(ge=0)]


class Kind(IntEnum):
    """Numbers are on disk: never reuse one. From POLICY to TOMBSTONE all but RESIZE are reserved for what comes later."""

    CREATE = 1
    EXEC_BEGIN = 2
    OUTPUT = 3
    INPUT = 4
    INPUT_END = 5
    SIGNAL = 6
    EXEC_END = 7
    FILE = 8
    STOP = 9
    EVENT = 10
    FILE_END = 11
    POLICY = 12
    PAUSE = 13
    RESUME = 14
    SNAPSHOT = 15
    FORK = 16
    RESIZE = 17
    BLOB = 18
    MODEL = 19
    ROLLOUT = 20
    TOMBSTONE = 21
    PACK = 22
    PACK_END = 23


OPERATION = frozenset(
    (
        Kind.EXEC_BEGIN,
        Kind.OUTPUT,
        Kind.INPUT,
        Kind.INPUT_END,
        Kind.SIGNAL,
        Kind.RESIZE,
        Kind.EXEC_END,
        Kind.FILE,
        Kind.FILE_END,
        Kind.PACK,
        Kind.PACK_END,
    )
)
"""Kinds that belong to one command, file operation or packing; the others belong to the sandbox as a whole."""


class Position(NamedTuple):
    """Where a record's entry begins."""

    segment: Count
    offset: Count


class Place(NamedTuple):
    """Where an entry stands, as its check values see it."""

    salt: int
    """Of the segment."""
    offset: int


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """Stored as an array: new fields go to the end and have a default; old readers skip them."""


class Created(_Body, frozen=True):
    spec: SandboxSpec
    """Secrets as keyed digests."""


class ExecBegun(_Body, frozen=True):
    digest: bytes
    """Of the request; the same id with another digest is a conflict."""
    request: Exec
    """Secrets as keyed digests."""


class Output(_Body, frozen=True):
    stream: Annotated[int, msgspec.Meta(ge=1, le=2)]
    offset: Count
    data: bytes


class Input(_Body, frozen=True):
    offset: Count
    data: bytes


class InputEnd(_Body, frozen=True):
    total: Count


class Signal(_Body, frozen=True):
    number: Count
    everyone: bool


class Resize(_Body, frozen=True):
    """Of a command's terminal, in characters."""

    rows: Count
    columns: Count


class ExecEnded(_Body, frozen=True):
    result: ExecResult


class FileBegun(_Body, frozen=True):
    verb: str
    path: bytes
    user: str = ""


class FileEnded(_Body, frozen=True):
    size: Count = 0
    digest: bytes = b""
    """SHA-256 of the content, where content was moved."""
    error: str = ""
    """Code of the error; empty for success."""


class PackBegun(_Body, frozen=True):
    digest: bytes
    """As of `ExecBegun`."""
    order: PackOrder


class PackEnded(_Body, frozen=True):
    packed: PackedLayer | None
    error: str = ""
    """Code of the error; empty for success."""


class Stopped(_Body, frozen=True):
    reason: str
    failed: bool = False
    """It ended by itself, or could not be trusted any more."""


class Event(_Body, frozen=True):
    name: str
    detail: bytes = b""


class Unread(_Body, frozen=True):
    """Body of a kind that this version does not know, as it was."""

    raw: bytes


Body = (
    Created
    | ExecBegun
    | Output
    | Input
    | InputEnd
    | Signal
    | Resize
    | ExecEnded
    | FileBegun
    | FileEnded
    | PackBegun
    | PackEnded
    | Stopped
    | Event
    | Unread
)

BODIES: dict[int, type[Body]] = {
    Kind.CREATE: Created,
    Kind.EXEC_BEGIN: ExecBegun,
    Kind.OUTPUT: Output,
    Kind.INPUT: Input,
    Kind.INPUT_END: InputEnd,
    Kind.SIGNAL: Signal,
    Kind.EXEC_END: ExecEnded,
    Kind.FILE: FileBegun,
    Kind.STOP: Stopped,
    Kind.EVENT: Event,
    Kind.FILE_END: FileEnded,
    Kind.RESIZE: Resize,
    Kind.PACK: PackBegun,
    Kind.PACK_END: PackEnded,
}


class Record(msgspec.Struct, frozen=True):
    """One thing that happened in a sandbox."""

    sandbox: str
    seq: int
    """Counts the sandbox's records from 1 without a gap."""
    kind: int
    key: str
    """Operation id given by the caller or the SDK; empty for what concerns the whole sandbox."""
    time_ns: int
    """Unix time when it was put in the log."""
    body: Body
    previous: Position | None = None
    """The newest earlier record of the same operation; for a kind outside OPERATION, of the sandbox as a whole."""


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    sandbox: str
    seq: Annotated[int, msgspec.Meta(ge=1)]
    kind: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: str
    time_ns: Count
    previous: Position | None
    body: msgspec.Raw


class _Owner(msgspec.Struct, frozen=True, array_like=True):
    sandbox: str


class SegmentHead(NamedTuple):
    number: int
    salt: int
    version: int = VERSION

    def encode(self) -> bytes:
        fixed = _HEAD.pack(MAGIC, self.version, 0, self.number, self.salt, 0)
        return fixed + _HEAD_CRC.pack(crc32c(fixed))


_encoder = msgspec.msgpack.Encoder()
_wire = msgspec.msgpack.Decoder(_Wire)
_owner = msgspec.msgpack.Decoder(_Owner)
_bodies = {kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}


def decode_head(data: bytes) -> SegmentHead:
    if len(data) < HEAD_SIZE:
        raise LogCorrupt("segment is shorter than its head")
    magic, version, _, number, salt, _ = _HEAD.unpack_from(data)
    (crc,) = _HEAD_CRC.unpack_from(data, _HEAD.size)
    if magic != MAGIC or crc != crc32c(data[: _HEAD.size]):
        raise LogCorrupt("this is not a trajectory segment, or its head is damaged")
    if version != VERSION:
        raise LogCorrupt(f"segment has version {version}, this program reads {VERSION}")
    return SegmentHead(number, salt, version)


def encode(record: Record, place: Place, synced: int) -> tuple[bytes, bytes | memoryview]:
    """The record's entry, which will stand at `place`, in two parts: much data is the second, where it is.

    `InvalidRequest` if it is too large.
    """
    body, bulk = _apart(record.body)
    try:
        payload = _encoder.encode(_fields(record, body))
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidRequest(f"a value cannot be stored: {error}") from error
    if bulk:
        payload = payload[: -len(_NO_DATA)] + _DATA_HEAD.pack(_BIN32, len(bulk))
    length = len(payload) + len(bulk)
    if length > MAX_PAYLOAD:
        raise InvalidRequest(f"record of {length} bytes; at most {MAX_PAYLOAD} can be stored")
    seed = crc32c(_PLACE.pack(*place))
    crc = crc32c(bulk, crc32c(payload, seed))
    return ENTRY.pack(length, crc, synced, crc32c(_MARK.pack(length, crc, synced), seed)) + payload, bulk


def _apart(body: Body) -> tuple[Body, bytes | memoryview]:
    """Data are the last thing of an entry, so that they need not be copied to stand behind the rest."""
    if isinstance(body, Output) and len(body.data) >= _BULK:
        return Output(body.stream, body.offset, b""), body.data
    if isinstance(body, Input) and len(body.data) >= _BULK:
        return Input(body.offset, b""), body.data
    return body, b""


def _fields(record: Record, body: Body) -> tuple[Any, ...]:
    shown = msgspec.Raw(body.raw) if isinstance(body, Unread) else body
    return (record.sandbox, record.seq, record.kind, record.key, record.time_ns, record.previous, shown)


def entry_length(head: bytes, place: Place) -> int | None:
    """Of the payload that follows an entry's head; None if the head is damaged."""
    length, _, _, check = ENTRY.unpack(head)
    return int(length) if 0 < length <= MAX_PAYLOAD and check == _head_check(head, place) else None


def entry_sound(head: bytes, payload: bytes, place: Place) -> bool:
    return bool(ENTRY.unpack(head)[1] == crc32c(payload, crc32c(_PLACE.pack(*place))))


def _head_check(head: bytes, place: Place) -> int:
    return crc32c(head[: _MARK.size], crc32c(_PLACE.pack(*place)))


def decode(payload: bytes) -> Record:
    """The record of a payload whose check value was right; still strict, for it may come from a foreign file."""
    try:
        wire = _wire.decode(payload)
        reader = _bodies.get(wire.kind)
        body: Body = reader.decode(wire.body) if reader else Unread(bytes(wire.body))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise LogCorrupt(f"entry is not a record: {error}") from error
    return Record(wire.sandbox, wire.seq, wire.kind, wire.key, wire.time_ns, body, wire.previous)


def beginning(sandbox: str) -> bytes:
    """What every payload of a sandbox begins with."""
    return bytes((0x90 | len(_Wire.__struct_fields__),)) + _encoder.encode(sandbox)


def owner(payload: bytes) -> str:
    """The sandbox of a record, without the rest of it. As `decode`."""
    try:
        return _owner.decode(payload).sandbox
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise LogCorrupt(f"entry is not a record: {error}") from error


_MAYBE_HEAD = re.compile(rb"(?=..[\x00-\x20]\x00.{12})", re.DOTALL)


def newest_sync_mark(data: bytes, place: Place) -> int:
    """The largest sync mark of any entry head in `data`, which begins at `place`; 0 if there is none.

    Looks at every byte, since the lengths in between can no longer be trusted; time is linear whatever the bytes are.
    """
    best = 0
    for match in _MAYBE_HEAD.finditer(data):
        at = match.start()
        _, _, synced, check = ENTRY.unpack_from(data, at)
        here = Place(place.salt, place.offset + at)
        if best < synced <= here.offset and check == _head_check(data[at : at + ENTRY.size], here):
            best = synced
    return best
