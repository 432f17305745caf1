"""Client of the native spawner, which makes containers: native/spawn.h is the protocol.

    async with Spawner.start(binary, guest, guest_uid=N) as spawner:
        child = await spawner.spawn(request)

One spawner process per node agent. Several spawns may be in flight. When the process dies, every pending spawn fails with
`CreateFailed` (phase `spawner`) and so does each later one: leave the context and start another. Containers outlive it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from barchan.backends.spawn_request import (
    MAGIC,
    NO_FLAGS,
    ParkRequest,
    Place,
    PlacedRequest,
    Removal,
    SpawnFlag,
    SpawnRequest,
    check,
)
from barchan.backends.spawner_process import Places, install_guest, launch, reap
from barchan.errors import BarchanError, CreateFailed, NodeStorageFull, SandboxDiskFull

__all__ = [
    "NO_FLAGS",
    "ParkRequest",
    "Place",
    "PlacedRequest",
    "Places",
    "SpawnFlag",
    "SpawnRequest",
    "Spawned",
    "Spawner",
    "install_guest",
]

T = TypeVar("T")
TIMES = ("clone", "maps", "overlay", "go", "cgroups", "namespaces", "mounts", "exec")
"""Names of `Spawned.times_us`. The last four are counted in the child, which overlaps with the first four."""

_REPLY = struct.Struct("<2I2i32s256sQ8I")
_MAX_ID = 1 << 32

_HINTS = {
    "request": "the spawner and the node agent are not from the same build, or a field is out of range",
    "ids": "all ranges of host user ids are taken: stop sandboxes on this host",
    "cgroups": "a cgroup of the sandbox cannot be made or does not take its limit",
    "limits": "a cgroup or the writable tree does not take a limit",
    "disk": "the writable tree cannot be made on the scratch volume",
    "clone": "user namespaces, or clone into a cgroup, are not available: run `barchan doctor`",
    "id-map": "the id range is mapped already or the kernel refused it",
    "layer-idmap": "the layer's file system cannot be idmapped, or its mount is not a fresh detached clone",
    "writable-idmap": "the scratch file system cannot be idmapped, or its mount is not a fresh detached clone",
    "overlay-lower": "a layer cannot be used: not a directory, or the kernel takes no layer descriptors (before Linux 6.13)",
    "overlay-upper": "the writable tree needs directories u and w, owned by 0:0",
    "overlay-readonly": "the writable tree cannot be written under the sandbox's ids: u and w must be owned by 0:0",
    "cgroup": "a cgroup refused the process: it is gone, or its limit of processes is 0",
    "data-mount": "a target of the spec's mounts is no directory, the image's /etc/resolv.conf is one, or a link in it leads elsewhere",
    "exec": "the guest binary cannot be run: wrong architecture, or on a file system mounted noexec",
    "guest-died": "the guest ended at once",
    "parked": "the waiting child ended, or too many wait",
    "spawner": "the spawner process ended; it is started again for the next sandbox",
}


@dataclass(frozen=True, slots=True)
class Spawned:
    """A running container. `pidfd` is the caller's to close; it polls readable when PID 1 has ended."""

    pid: int
    pidfd: int
    times_us: tuple[int, ...]
    """Microseconds since the spawner took the request, named by `TIMES`."""
    order: int
    """Of the request: names a parked child."""


class _Message(NamedTuple):
    id: int
    data: bytes
    fds: tuple[int, ...]
    sent: Callable[[], None] | None


class Spawner:
    """A running spawner process. Make it with `start`."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, link: socket.socket) -> None:
        self._process = process
        self._pidfd = pidfd
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[Spawned]] = {}
        self._removing: dict[int, asyncio.Future[int]] = {}
        self._queue: deque[_Message] = deque()
        self._writing = False
        self._next = 1
        self._dead: CreateFailed | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, binary: Path, guest: Path, guest_uid: int, places: Places | None = None
    ) -> AsyncIterator[Spawner]:
        """Runs `binary`; `guest` is what `install_guest` returned; `guest_uid` a host id in no sandbox's range.

        Without `places` it takes neither `PlacedRequest` nor `remove`.

        Leaving the context ends the process; containers live on. Raises `CreateFailed` when it cannot be run.
        """
        with contextlib.ExitStack() as stack:
            process, link = launch(binary, guest, guest_uid, places)
            stack.callback(reap, process)
            stack.enter_context(link)
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            spawner = cls(process, pidfd, link)
            spawner._watch()
            try:
                yield spawner
            finally:
                spawner._fail(_gone("the spawner was closed"))

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of `subprocess`; known once the context was left."""
        return self._process.returncode

    async def spawn(self, request: SpawnRequest | PlacedRequest, sent: Callable[[], None] | None = None) -> Spawned:
        """Returns once the guest's binary runs. Raises `CreateFailed`: `phase` is the step, the message holds the errno;
        `NodeStorageFull` and `SandboxDiskFull` when its tree has no room.

        Cancelling it ends the container, should it come to be. `sent` is called when the descriptors may be closed.
        """
        check(request)
        return await self._ask(request, sent)

    async def park(self, request: ParkRequest | PlacedRequest) -> Spawned:
        """A child that waits until a `spawn` names it by its `order`; it ends with the spawner. Raises as `spawn`."""
        return await self._ask(request)

    async def remove(self, names: Sequence[str]) -> list[str]:
        """Remove places in which nothing runs. Returns those of which something is left. Raises `CreateFailed`."""
        left = await self._submit(Removal(tuple(names)), self._removing)
        return [name for number, name in enumerate(names) if left >> number & 1]

    async def _ask(
        self, request: SpawnRequest | PlacedRequest | ParkRequest, sent: Callable[[], None] | None = None
    ) -> Spawned:
        future = self._submit(request, self._pending, sent)
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(future)
            raise

    def _submit(
        self,
        request: SpawnRequest | PlacedRequest | ParkRequest | Removal,
        waiting: dict[int, asyncio.Future[T]],
        sent: Callable[[], None] | None = None,
    ) -> asyncio.Future[T]:
        if self._dead is not None:
            raise _gone(self._dead.message)
        id_, self._next = self._next, self._next % (_MAX_ID - 1) + 1
        future: asyncio.Future[T] = self._loop.create_future()
        waiting[id_] = future
        self._queue.append(_Message(id_, request.pack(id_), request.descriptors(), sent))
        self._write()
        return future

    def _abandon(self, future: asyncio.Future[Spawned]) -> None:
        id_ = next((id_ for id_, pending in self._pending.items() if pending is future), None)
        if id_ is None:
            if future.done() and not future.cancelled() and future.exception() is None:
                _end(future.result())
            return
        del self._pending[id_]
        self._queue = deque(entry for entry in self._queue if entry.id != id_)  # sent already: `_deliver` ends it

    # the loop's side

    def _watch(self) -> None:
        self._loop.add_reader(self._link.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._died)

    def _unwatch(self) -> None:
        # Before the descriptors are closed: uvloop aborts the process otherwise.
        self._loop.remove_reader(self._link.fileno())
        self._loop.remove_writer(self._link.fileno())
        self._loop.remove_reader(self._pidfd)

    def _write(self) -> None:
        while self._queue:
            message = self._queue[0]
            try:
                socket.send_fds(self._link, [message.data], message.fds)
            except BlockingIOError:
                self._await_room(True)
                return
            except OSError as error:
                self._refuse(self._queue.popleft().id, error)
            else:
                self._queue.popleft()
                if message.sent is not None:
                    message.sent()
        if self._dead is None:
            self._await_room(False)

    def _await_room(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._link.fileno(), self._write)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._link.fileno())
        self._writing = wanted

    def _refuse(self, id_: int, error: OSError) -> None:
        """Sending failed: a bad descriptor is that request's fault, a broken link everyone's."""
        if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
            self._fail(_gone("the spawner ended"))
            return
        future: asyncio.Future[Any] | None = self._pending.pop(id_, None) or self._removing.pop(id_, None)
        if future is not None and not future.done():
            future.set_exception(CreateFailed(f"cannot ask the spawner: {error}", phase="spawner-send"))

    def _read(self) -> bool:
        """One answer; the loop calls again as long as there are more. False when there is none."""
        try:
            data, fds = _receive(self._link)
        except BlockingIOError:
            return False
        except OSError as error:
            self._fail(_gone(f"the link to the spawner broke: {error}"))
            return False
        if data:
            self._take(data, fds)
        else:
            self._fail(_gone("the spawner hung up"))
        return bool(data)

    def _take(self, data: bytes, fds: list[int]) -> None:
        magic, id_, pid, error, step, log, left, *times = _REPLY.unpack(data)
        removal = self._removing.pop(id_, None)
        future = self._pending.pop(id_, None)
        waiting: asyncio.Future[Any] | None = removal or future
        if magic != MAGIC or (not error and not fds and removal is None):
            self._fail(_gone("the spawner speaks another protocol"))
        elif error and waiting is not None and not waiting.done():
            waiting.set_exception(_failure(error, _text(step), _text(log)))
        elif not error and removal is not None:
            if not removal.done():
                removal.set_result(left)
        elif not error:
            _deliver(future, Spawned(pid, fds[0], tuple(times), id_))

    def _died(self) -> None:
        while self._dead is None and self._read():
            pass  # an answer that it still gave
        if self._dead is None:
            self._fail(_gone("the spawner ended"))

    def _fail(self, error: CreateFailed) -> None:
        if self._dead is not None:
            return
        self._dead = error
        self._unwatch()
        self._queue.clear()
        waiting: list[asyncio.Future[Any]] = [*self._pending.values(), *self._removing.values()]
        self._pending, self._removing = {}, {}
        for future in waiting:
            if not future.done():
                future.set_exception(_gone(error.message))


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = link.recvmsg(_REPLY.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def _deliver(future: asyncio.Future[Spawned] | None, child: Spawned) -> None:
    if future is None or future.done():
        _end(child)
    else:
        future.set_result(child)


def _end(child: Spawned) -> None:
    """Nobody wants it any more. Its cgroup and files are the caller's to clean, as after any failed create."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    os.close(child.pidfd)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace").strip()


def _gone(message: str) -> CreateFailed:
    return CreateFailed(message, phase="spawner", hint=_HINTS["spawner"])


def _failure(error: int, step: str, log: str) -> BarchanError:
    name = errno.errorcode.get(error, str(error))
    kernel = f"; the kernel says: {log}" if log else ""
    text = f"container set-up failed at {step}: {name} ({os.strerror(error)}){kernel}"
    if step == "disk" and error == errno.ENOSPC:
        return NodeStorageFull(f"the scratch volume or its disk is full: {text}", phase=step)
    if step == "disk" and error == errno.EDQUOT:
        return SandboxDiskFull(f"the sandbox's disk limit is too small: {text}", phase=step)
    return CreateFailed(text, phase=step, hint=_HINTS.get(step, ""))
