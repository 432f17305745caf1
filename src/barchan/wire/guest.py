"""Guest messages: requests to bytes, answers to values. The format is docs/reference/guest-protocol.md.

What comes from the guest is hostile: every length is checked against the bytes there are, and anything odd is a
`ProtocolError`. Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Literal, NamedTuple

from barchan.errors import ProtocolError
from barchan.spec import FileStat
from barchan.wire.frames import FrameType, Payload, encode

VERSION_OLDEST, VERSION_NEWEST = 1, 1
KEEP = 0xFFFFFFFF
ALL = 0xFFFFFFFFFFFFFFFF
MAX_FROM_GUEST = (1 << 20) + 64
"""Of the payloads that a guest sends; it takes up to `frames.MAX_PAYLOAD`."""
INPUT_WINDOW = 256 << 10
"""Input bytes that the guest takes beyond those it has taken, before it says so."""

_ENTRY = struct.Struct("<B3xIIIIQq")
_DONE = struct.Struct("<B3xiQQQQI")
_WELCOME = struct.Struct("<HHIQQ")
_KNOWN = struct.Struct("<QBBHIQQQQ")
_PROCESS = struct.Struct("<IIIB3xQQ")


class OpKind(IntEnum):
    EXEC = 1
    STAT = 2
    LIST = 3
    READ = 4
    WRITE = 5
    MKDIR = 6
    REMOVE = 7
    RENAME = 8
    GET_TREE = 9
    PUT_TREE = 10
    PROCESSES = 11
    RUN = 12


class ExecFlag(IntEnum):
    STDIN = 1
    MERGE = 2
    KEEP_BACKGROUND = 4
    TTY = 8
    SHELL = 16


class GuestOutcome(IntEnum):
    EXITED = 0
    SIGNALED = 1
    TIMED_OUT = 2
    CANCELLED = 3
    FAILED = 4


class Refusal(IntEnum):
    KNOWN = 1
    BAD = 2
    BUSY = 3


class KnownOp(NamedTuple):
    """An operation that the guest still holds, from its WELCOME."""

    id: int
    kind: int
    done: bool
    pid: int
    taken: int
    out_base: int
    err_base: int


class Welcome(NamedTuple):
    version: int
    boot: int
    last: int
    ops: tuple[KnownOp, ...]


class Done(NamedTuple):
    outcome: GuestOutcome
    code: int
    wall_ns: int
    user_us: int
    system_us: int
    max_rss: int
    background: int
    detail: bytes


class Entry(NamedTuple):
    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    mtime_ns: int
    target: bytes


class GuestProcess(NamedTuple):
    pid: int
    ppid: int
    uid: int
    state: str
    rss: int
    op: int
    argv: tuple[bytes, ...]


class Cursor:
    """Reads counted fields from one buffer; running past its end is a `ProtocolError`."""

    def __init__(self, data: Payload) -> None:
        self._data = bytes(data)
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    @property
    def at(self) -> int:
        return self._at

    def fixed(self, layout: struct.Struct) -> tuple[int, ...]:
        if self.left < layout.size:
            raise ProtocolError("message ends early")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def blob(self) -> bytes:
        (size,) = self.fixed(_U32)
        if self.left < size:
            raise ProtocolError("message ends early")
        self._at += size
        return self._data[self._at - size : self._at]

    def blobs(self) -> tuple[bytes, ...]:
        (count,) = self.fixed(_U32)
        if count * 4 > self.left:
            raise ProtocolError("list is longer than its message")
        return tuple(self.blob() for _ in range(count))


_U32 = struct.Struct("<I")


def blob(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def blobs(items: tuple[bytes, ...] | list[bytes]) -> bytes:
    return _U32.pack(len(items)) + b"".join(blob(item) for item in items)


def hello() -> bytes:
    return encode(FrameType.HELLO, 0, struct.pack("<HH", VERSION_OLDEST, VERSION_NEWEST))


def start(op: int, kind: OpKind, user: bytes, *parts: bytes) -> bytes:
    return encode(FrameType.START, op, b"".join((struct.pack("<B3x", kind), blob(user), *parts)))


def exec_parts(
    *,
    flags: int,
    timeout_ms: int,
    grace_ms: int,
    output_limit: int,
    nofile: int,
    cwd: bytes,
    argv: tuple[bytes, ...],
    env: list[bytes],
    rows: int = 0,
    columns: int = 0,
) -> bytes:
    head = struct.pack("<IIIQIHH", flags, timeout_ms, grace_ms, output_limit, nofile, rows, columns)
    return head + blob(cwd) + blobs(argv) + blobs(env)


def run_parts(*, shell: int, timeout_ms: int, grace_ms: int, output_limit: int, command: bytes) -> bytes:
    """A command line for the shell session that operation `shell` opened."""
    return struct.pack("<QIIQ", shell, timeout_ms, grace_ms, output_limit) + blob(command)


def resize(op: int, rows: int, columns: int) -> bytes:
    return encode(FrameType.RESIZE, op, struct.pack("<HH", rows, columns))


def signal(op: int, number: int, everyone: bool) -> bytes:
    return encode(FrameType.SIGNAL, op, struct.pack("<II", number, int(everyone)))


def decode_welcome(payload: Payload) -> Welcome:
    cursor = Cursor(payload)
    version, _, count, boot, last = cursor.fixed(_WELCOME)
    if count * _KNOWN.size != cursor.left:
        raise ProtocolError("WELCOME does not hold as many operations as it says")
    ops = []
    for _ in range(count):
        op, kind, done, _, pid, taken, out, err, _ = cursor.fixed(_KNOWN)
        ops.append(KnownOp(op, kind, bool(done), pid, taken, out, err))
    return Welcome(version, boot, last, tuple(ops))


def decode_done(payload: Payload) -> Done:
    cursor = Cursor(payload)
    outcome, code, wall_ns, user_us, system_us, max_rss, background = cursor.fixed(_DONE)
    detail = cursor.blob()
    if cursor.left or outcome not in list(GuestOutcome):
        raise ProtocolError("malformed DONE")
    return Done(GuestOutcome(outcome), code, wall_ns, user_us, system_us, max_rss, background, detail)


def decode_refused(payload: Payload) -> tuple[int, bytes]:
    cursor = Cursor(payload)
    (reason,) = cursor.fixed(_U32)
    return reason, cursor.blob()


ENTRY_KINDS = "fdlpscb"
ITEM_KINDS = ENTRY_KINDS + "x"
"""Of tree items: `x` is something that the user may not read, sent without contents."""


def read_entry(cursor: Cursor, kinds: str = ENTRY_KINDS) -> Entry:
    path = cursor.blob()
    kind, mode, uid, gid, nlink, size, mtime = cursor.fixed(_ENTRY)
    if chr(kind) not in kinds:
        raise ProtocolError("entry of no known kind")
    return Entry(path, chr(kind), mode & 0o7777, uid, gid, nlink, size, mtime, cursor.blob())


def encode_entry(entry: Entry) -> bytes:
    fixed = _ENTRY.pack(ord(entry.kind), entry.mode, entry.uid, entry.gid, entry.nlink, entry.size, entry.mtime_ns)
    return blob(entry.path) + fixed + blob(entry.target)


def read_process(cursor: Cursor) -> GuestProcess:
    pid, ppid, uid, state, rss, op = cursor.fixed(_PROCESS)
    return GuestProcess(pid, ppid, uid, chr(state), rss, op, cursor.blobs())


_KINDS: dict[str, Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]] = {
    "f": "file", "d": "directory", "l": "symlink", "p": "fifo", "s": "socket", "c": "char", "b": "block",
}  # fmt: skip


def stat_of(entry: Entry, path: bytes) -> FileStat:
    """The public value of an entry, under the name by which the caller knows it."""
    return FileStat(
        path=path,
        kind=_KINDS[entry.kind],
        size=entry.size,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        nlink=entry.nlink,
        target=entry.target,
    )
