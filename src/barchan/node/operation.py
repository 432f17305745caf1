"""One guest operation that is no command (files, processes): its streams are passed through, its result is a detail.

Unlike a command it is not taken up again after the node agent died: the guest is told to cancel it, and the caller
sends it again (writes appear whole or not at all).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from typing import Protocol

from barchan.errors import (
    BarchanError,
    FileAlreadyExists,
    FileDenied,
    FileFailure,
    FileIsDirectory,
    FileMissing,
    FileNotDirectory,
    InvalidRequest,
    ProtocolError,
    SandboxDiskFull,
    SandboxUnavailable,
)
from barchan.node.channel import GuestChannel
from barchan.node.outcome import is_shortage, no_user, shortage
from barchan.wire import guest
from barchan.wire.frames import STDIN, STDOUT, U64, Frame, FrameType, Payload, decode_data, decode_eof, decode_u64

_ERRNO: dict[int, type[BarchanError]] = {
    errno.ENOENT: FileMissing,
    errno.EACCES: FileDenied,
    errno.EPERM: FileDenied,
    errno.EROFS: FileDenied,
    errno.EEXIST: FileAlreadyExists,
    errno.EISDIR: FileIsDirectory,
    errno.ENOTDIR: FileNotDirectory,
    errno.ENOSPC: SandboxDiskFull,
    errno.EDQUOT: SandboxDiskFull,
}
_NO_FILE = frozenset((errno.EINVAL, errno.ENXIO, errno.ELOOP, errno.ENODEV))
"""What the guest answers for devices, FIFOs, sockets and the magic links of /proc."""


class Caller(Protocol):
    def send_frame(self, type_: int, payload: Payload, stream: int = 0) -> None: ...


class Collector:
    """The caller of an operation whose output the node itself reads: takes everything, up to a bound."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def send_frame(self, type_: int, payload: Payload, stream: int = 0) -> None:
        if type_ == FrameType.DATA:
            self.data += decode_data(payload)[1]
            if len(self.data) > self._most:
                raise ProtocolError("the guest's answer is too long")


def file_error(code: int, step: str, path: bytes, user: str) -> BarchanError:
    """The typed error for a guest's errno."""
    name = path.decode(errors="replace")
    if code == errno.EAGAIN:
        hint = "the lease ends when its holder lets go, or after the host's fs.lease-break-time"
        return FileFailure(f"{name}: a program in the sandbox holds a lease on it", phase=step, field="path", hint=hint)
    if is_shortage(code):
        return shortage(code, step, name or "processes")
    if step == "user":
        return no_user(user)
    if step == "depth":
        return FileFailure(
            f"{name}: its directories are nested too deeply", phase=step, field="path", hint="at most 200 levels"
        )
    if code in _NO_FILE:
        return FileFailure(f"{name}: not a regular file or directory", phase=step, field="path")
    cls = _ERRNO.get(code, FileFailure)
    return cls(f"{name}: {os.strerror(code).lower()}", phase=step, field="path")


class Operation:
    """Bind it to a channel, feed it the caller's frames, await `detail`."""

    def __init__(self, path: bytes, caller: Caller, user: str = "") -> None:
        self.path = path
        self.user = user
        self.size = 0
        """Input bytes passed on."""
        self.detail: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._caller = caller
        self._hash = hashlib.sha256()
        self._channel: GuestChannel | None = None
        self._op = 0
        self._early: list[Frame] = []
        self._takes = guest.INPUT_WINDOW
        self._granted = 0
        self._received = 0

    @property
    def digest(self) -> bytes:
        """Of the input."""
        return self._hash.digest()

    def begin(self, channel: GuestChannel, op: int, start: bytes) -> None:
        """Send the START and what the caller sent meanwhile."""
        self._channel, self._op = channel, op
        channel.listen(op, self.on_guest)
        channel.send(start)
        self._caller.send_frame(FrameType.CREDIT, U64.pack(guest.INPUT_WINDOW), STDIN)
        early, self._early = self._early, []
        try:
            for frame in early:
                self.on_caller(frame)
        except ProtocolError as error:
            self.cancel()
            self.fail(error)

    def on_caller(self, frame: Frame) -> None:
        """DATA, EOF of stream 0 and CREDIT of stream 1 from the caller. Raises `ProtocolError` for one out of turn."""
        if self._channel is None:
            if len(self._early) >= 64:
                raise InvalidRequest("too many frames before the operation began")
            self._early.append(frame)
        elif frame.type == FrameType.DATA and frame.stream == STDIN:
            self._take_input(*decode_data(frame.payload))
            self._channel.send_frame(FrameType.DATA, self._op, frame.payload, STDIN)
        elif frame.type == FrameType.EOF and frame.stream == STDIN:
            if decode_eof(frame.payload)[0] != self.size:
                raise ProtocolError("the input ends at the wrong place")
            self._channel.send_frame(FrameType.EOF, self._op, frame.payload, STDIN)
        elif frame.type == FrameType.CREDIT and frame.stream == STDOUT:
            self._granted = max(self._granted, decode_u64(frame.payload))
            self._channel.send_frame(FrameType.CREDIT, self._op, frame.payload, STDOUT)

    def _take_input(self, offset: int, data: Payload) -> None:
        if offset != self.size or offset + len(data) > self._takes:
            raise ProtocolError("input out of turn")
        self._hash.update(data)
        self.size += len(data)

    def on_guest(self, frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            offset, data = decode_data(frame.payload)
            self._check_output(frame.stream, offset, len(data))
            self._caller.send_frame(FrameType.DATA, frame.payload, STDOUT)
            self._acknowledge(offset + len(data))
        elif frame.type == FrameType.EOF:
            decode_eof(frame.payload)
            if frame.stream == STDOUT:
                self._caller.send_frame(FrameType.EOF, frame.payload, STDOUT)
        elif frame.type == FrameType.CREDIT:
            self._takes = max(self._takes, decode_u64(frame.payload))
            self._caller.send_frame(FrameType.CREDIT, frame.payload, STDIN)
        elif frame.type == FrameType.DONE:
            self._done(guest.decode_done(frame.payload))
        elif frame.type == FrameType.REFUSED:
            _, text = guest.decode_refused(frame.payload)
            self.fail(InvalidRequest(f"the sandbox refused the request: {text[:200]!r}"))

    def fail(self, error: BarchanError) -> None:
        if not self.detail.done():
            self.detail.set_exception(error)
            self.detail.exception()

    def cancel(self) -> None:
        """The caller gave up."""
        if self._channel is not None:
            self._channel.send_frame(FrameType.CANCEL, self._op)

    def _check_output(self, stream: int, offset: int, size: int) -> None:
        """What nobody gave credit for would wait in the memory of everybody on the way."""
        if stream != STDOUT:
            raise ProtocolError(f"the guest used stream {stream} of a file operation")
        if offset != self._received or offset + size > self._granted:
            raise ProtocolError("the guest sent output out of turn")
        self._received += size

    def _acknowledge(self, offset: int) -> None:
        if self._channel is not None:
            self._channel.send_frame(FrameType.ACK, self._op, U64.pack(offset), STDOUT)

    def _done(self, done: guest.Done) -> None:
        if self._channel is not None:
            self._channel.release(self._op)
        if self.detail.done():
            return
        if done.outcome == guest.GuestOutcome.EXITED:
            self.detail.set_result(done.detail)
        elif done.outcome == guest.GuestOutcome.CANCELLED:
            self.fail(SandboxUnavailable("the operation was cancelled"))
        else:
            self.fail(file_error(done.code, done.detail.decode(errors="replace"), self.path, self.user))
