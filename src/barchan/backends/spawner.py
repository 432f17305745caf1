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
import hashlib
import os
import signal
import socket
import stat
import struct
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from barchan.backends.spawn_request import MAGIC, NO_FLAGS, ParkRequest, SpawnFlag, SpawnRequest, check
from barchan.errors import CreateFailed

__all__ = ["NO_FLAGS", "ParkRequest", "SpawnFlag", "SpawnRequest", "Spawned", "Spawner", "install_guest"]

TIMES = ("clone", "maps", "overlay", "go", "cgroups", "namespaces", "mounts", "exec")
"""Names of `Spawned.times_us`. The last four are counted in the child, which overlaps with the first four."""

_REPLY = struct.Struct("<2I2i32s256s8I")
_MAX_ID = 1 << 32

_HINTS = {
    "request": "the spawner and the node agent are not from the same build, or a field is out of range",
    "clone": "user namespaces, or clone into a cgroup, are not available: run `barchan doctor`",
    "id-map": "the id range is mapped already or the kernel refused it",
    "layer-idmap": "the layer's file system cannot be idmapped, or its mount is not a fresh detached clone",
    "writable-idmap": "the scratch file system cannot be idmapped, or its mount is not a fresh detached clone",
    "overlay-lower": "a layer cannot be used: not a directory, or the kernel takes no layer descriptors (before Linux 6.13)",
    "overlay-upper": "the writable tree needs directories u and w, owned by 0:0",
    "overlay-readonly": "the writable tree cannot be written under the sandbox's ids: u and w must be owned by 0:0",
    "cgroup": "a cgroup refused the process: it is gone, or its limit of processes is 0",
    "data-mount": "a target of the spec's mounts is no directory, or a link in the image leads it elsewhere",
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


def install_guest(source: Path, directory: Path) -> Path:
    """Copies the guest binary to a file of real root, mode 0111, named by its digest; returns its path.

    The mode matters: a binary that the sandbox cannot read ties the memory of PID 1 to the host's user namespace, so
    that no capability of the sandbox reaches it. The directory must be root's own. Raises OSError.
    """
    content = source.read_bytes()
    target = directory / f"guest-{hashlib.sha256(content).hexdigest()[:16]}"
    if _is_sealed(target):
        return target
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{target.name}.{os.getpid()}"
    fresh.write_bytes(content)
    os.chown(fresh, 0, 0)
    fresh.chmod(0o111)
    fresh.rename(target)
    return target


def _is_sealed(path: Path) -> bool:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return facts.st_uid == 0 and stat.S_IMODE(facts.st_mode) == 0o111


class Spawner:
    """A running spawner process. Make it with `start`."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, link: socket.socket) -> None:
        self._process = process
        self._pidfd = pidfd
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[Spawned]] = {}
        self._queue: deque[tuple[int, bytes, tuple[int, ...]]] = deque()
        self._writing = False
        self._next = 1
        self._dead: CreateFailed | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, binary: Path, guest: Path, guest_uid: int) -> AsyncIterator[Spawner]:
        """Runs `binary`; `guest` is what `install_guest` returned; `guest_uid` a host id in no sandbox's range.

        Leaving the context ends the process; containers live on. Raises `CreateFailed` when it cannot be run.
        """
        with contextlib.ExitStack() as stack:
            process, link = _launch(binary, guest, guest_uid)
            stack.callback(_reap, process)
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

    async def spawn(self, request: SpawnRequest) -> Spawned:
        """Returns once the guest's binary runs. Raises `CreateFailed`: `phase` is the step, the message holds the errno.

        Cancelling it ends the container, should it come to be.
        """
        check(request)
        return await self._ask(request)

    async def park(self, request: ParkRequest) -> Spawned:
        """A child that waits until a `spawn` names it by its `order`; it ends with the spawner. Raises `CreateFailed`."""
        return await self._ask(request)

    async def _ask(self, request: SpawnRequest | ParkRequest) -> Spawned:
        if self._dead is not None:
            raise _gone(self._dead.message)
        id_, self._next = self._next, self._next % (_MAX_ID - 1) + 1
        future: asyncio.Future[Spawned] = self._loop.create_future()
        self._pending[id_] = future
        self._queue.append((id_, request.pack(id_), request.descriptors()))
        self._write()
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(id_, future)
            raise

    def _abandon(self, id_: int, future: asyncio.Future[Spawned]) -> None:
        if self._pending.pop(id_, None) is None:
            if future.done() and not future.cancelled() and future.exception() is None:
                _end(future.result())
            return
        self._queue = deque(entry for entry in self._queue if entry[0] != id_)  # sent already: `_deliver` ends it

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
            _, message, fds = self._queue[0]
            try:
                socket.send_fds(self._link, [message], fds)
            except BlockingIOError:
                self._await_room(True)
                return
            except OSError as error:
                self._refuse(self._queue.popleft()[0], error)
            else:
                self._queue.popleft()
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
        future = self._pending.pop(id_, None)
        if future is not None and not future.done():
            future.set_exception(CreateFailed(f"cannot ask the spawner: {error}", phase="spawner-send"))

    def _read(self) -> None:
        while self._dead is None:
            try:
                data, fds = _receive(self._link)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(_gone(f"the link to the spawner broke: {error}"))
                return
            if not data:
                self._fail(_gone("the spawner hung up"))
                return
            self._take(data, fds)

    def _take(self, data: bytes, fds: list[int]) -> None:
        magic, id_, pid, error, step, log, *times = _REPLY.unpack(data)
        future = self._pending.pop(id_, None)
        if magic != MAGIC or (not error and not fds):
            self._fail(_gone("the spawner speaks another protocol"))
        elif error and future is not None and not future.done():
            future.set_exception(_failure(error, _text(step), _text(log)))
        elif not error:
            _deliver(future, Spawned(pid, fds[0], tuple(times), id_))

    def _died(self) -> None:
        self._read()  # answers that it still gave
        if self._dead is None:
            self._fail(_gone("the spawner ended"))

    def _fail(self, error: CreateFailed) -> None:
        if self._dead is not None:
            return
        self._dead = error
        self._unwatch()
        self._queue.clear()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(_gone(error.message))


def _launch(binary: Path, guest: Path, guest_uid: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = _run(binary, guest, guest_uid, theirs.fileno())
        except OSError as error:
            ours.close()
            hint = "build the native part: make -C native"
            raise CreateFailed(f"cannot start the spawner: {error}", phase="spawner", hint=hint) from error
    ours.setblocking(False)
    return process, ours


def _run(binary: Path, guest: Path, guest_uid: int, link: int) -> subprocess.Popen[bytes]:
    guest_fd = os.open(guest, os.O_PATH | os.O_CLOEXEC)
    try:
        command = [str(binary), "--socket", str(link), "--guest", str(guest_fd), "--guest-uid", str(guest_uid)]
        return subprocess.Popen(command, pass_fds=(link, guest_fd), stdin=subprocess.DEVNULL, cwd="/")
    finally:
        os.close(guest_fd)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """The link is closed: it ends by itself."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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


def _failure(error: int, step: str, log: str) -> CreateFailed:
    name = errno.errorcode.get(error, str(error))
    kernel = f"; the kernel says: {log}" if log else ""
    text = f"container set-up failed at {step}: {name} ({os.strerror(error)}){kernel}"
    return CreateFailed(text, phase=step, hint=_HINTS.get(step, ""))
