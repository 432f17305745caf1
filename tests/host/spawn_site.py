"""What a spawner test needs on a host: a tiny image as an EROFS layer, scratch directories, cgroups, the built programs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from barchan.backends.spawner import NO_FLAGS, Spawned, Spawner, SpawnFlag, SpawnRequest, install_guest
from barchan.kernel import syscalls
from barchan.wire.guest import Done, OpKind
from tests.host.guest_client import Link, exec_parts

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
GUEST_UID = 900_000_001
UID_BASE, UID_COUNT = 910_000_000, 65_536
APPLETS = [
    "sh",
    "cat",
    "ls",
    "id",
    "stat",
    "grep",
    "cp",
    "chmod",
    "mount",
    "umount",
    "ip",
    "dd",
    "find",
    "hostname",
    "touch",
    "rm",
    "mv",
    "mkdir",
    "df",
    "readlink",
    "chown",
    "sleep",
    "true",
    "head",
]

PROGRAMS = (
    "attack_kernel",
    "attack_pid1",
    "attack_search",
    "attack_trap",
    "seccomp_answers",
    "show_ids",
    "hold_inotify",
    "hold_memory",
    "hold_locks",
)
"""Built from native/tests, put into the image."""


@dataclass(frozen=True)
class Result:
    code: int
    output: str

    def lines(self) -> dict[str, str]:
        """First word of each line -> the rest."""
        return {name: rest for name, _, rest in (line.partition(" ") for line in self.output.splitlines())}


@dataclass(frozen=True)
class Box:
    child: Spawned
    path: Path
    """Of the listening socket."""
    tree: Path
    """The writable tree: u and w."""
    group: Path
    uid_base: int

    async def run(self, *argv: str, uid: int = 0) -> Result:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        try:
            writer.write(b"\0".join([str(uid).encode(), *(word.encode() for word in argv)]) + b"\0")
            writer.write_eof()
            output, _, code = (await reader.read()).decode().rpartition("\n#exit ")
        finally:
            writer.close()
            await writer.wait_closed()
        return Result(int(code), output)

    async def lines(self, *argv: str) -> AsyncGenerator[str, None]:
        """Output line by line while the program runs, as root."""
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        try:
            writer.write(b"\0".join([b"0", *(word.encode() for word in argv)]) + b"\0")
            writer.write_eof()
            async for line in reader:
                yield line.decode().rstrip("\n")
        finally:
            writer.close()
            await writer.wait_closed()

    async def sh(self, script: str, uid: int = 0) -> str:
        """Output of a script that must succeed."""
        result = await self.run("/bin/sh", "-ec", script, uid=uid)
        assert result.code == 0, result
        return result.output


@dataclass(frozen=True)
class Site:
    base: Path
    layer_path: Path
    groups: Path
    v1: Path | None
    """A group of the v1 pids hierarchy, where there is one."""
    counter: Iterator[int] = field(default_factory=itertools.count)

    def guest(self, name: str = "probe_guest") -> Path:
        return install_guest(NATIVE / "build" / name, self.base / "guest")

    @contextlib.asynccontextmanager
    async def spawner(self, guest: Path | None = None, binary: str = "spawner") -> AsyncIterator[Spawner]:
        async with Spawner.start(NATIVE / "build" / binary, guest or self.guest(), GUEST_UID) as spawner:
            yield spawner

    @contextlib.contextmanager
    def request(self, **changes: Any) -> Iterator[tuple[SpawnRequest, Path, Path, Path]]:
        """A fresh request with its socket, tree and group; closes the descriptors and removes the group."""
        number = next(self.counter)
        with contextlib.ExitStack() as stack:
            tree, group = self.base / "trees" / str(number), self.groups / str(number)
            for name in "uw":
                (tree / name).mkdir(parents=True)
            group.mkdir()
            stack.callback(remove_group, group)
            for name in ("", "cgroup.procs", "cgroup.subtree_control"):
                os.chown(group / name, GUEST_UID, GUEST_UID)
            groups: tuple[int, ...] = ()
            if self.v1 is not None:
                v1 = self.v1 / str(number)
                v1.mkdir()
                stack.callback(remove_group, v1)
                groups = (_keep(stack, os.open(v1 / "tasks", os.O_WRONLY)),)
            path = self.base / f"s{number}"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(8)
            request = SpawnRequest(
                uid_base=UID_BASE + number * UID_COUNT, uid_count=UID_COUNT, hostname="box", listener=listener.fileno(),
                writable=_keep(stack, syscalls.open_tree(tree, clone=True)),
                cgroup=_keep(stack, os.open(group, os.O_PATH | os.O_DIRECTORY)),
                layers=(_keep(stack, syscalls.open_tree(self.layer_path, clone=True)),), groups=groups,
            )  # fmt: skip
            yield replace(request, **changes), path, tree, group

    @contextlib.asynccontextmanager
    async def box(
        self, spawner: Spawner, flags: SpawnFlag = NO_FLAGS, above: tuple[int, ...] = (), **changes: Any
    ) -> AsyncIterator[Box]:
        """A running container, ended on leaving; `above`: further layers on top of the image."""
        with self.request(flags=flags, **changes) as (request, path, tree, group):
            request = replace(request, layers=(*above, *request.layers))
            child = await spawner.spawn(request)
            try:
                yield Box(child, path, tree, group, request.uid_base)
            finally:
                await end(child)


async def end(child: Spawned) -> None:
    kill(child)
    await ended(child.pidfd)
    os.close(child.pidfd)


def kill(child: Spawned) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


async def ended(pidfd: int, timeout: float = 10) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, event.set)
    try:
        await asyncio.wait_for(event.wait(), timeout)
    finally:
        loop.remove_reader(pidfd)


def _keep(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def remove_group(path: Path) -> None:
    """Ends what is in it; a group is busy until the kernel has let go of the last process."""
    for _ in range(2000):
        try:
            for inner in path.iterdir():
                if inner.is_dir():
                    inner.rmdir()
            path.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            os.sched_yield()
    raise AssertionError(f"{path} stays busy")


def build_programs() -> None:
    (NATIVE / "build").mkdir(exist_ok=True)
    with (NATIVE / "build" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            ["make", "-s", "-C", NATIVE, "-f", "Makefile", "all", "spawner-tests"],
            capture_output=True,
            text=True,
            check=False,
        )
    if made.returncode:
        pytest.fail(f"the spawner does not build: {made.stdout}{made.stderr}")


def _image(at: Path) -> Path:
    busybox = shutil.which("busybox")
    if (
        busybox is None
        or b"statically linked" not in subprocess.run(["file", "-L", busybox], capture_output=True, check=False).stdout
    ):
        busybox = "/bin/busybox"
    (at / "bin").mkdir(parents=True)
    for name in ("proc", "sys", "dev", "tmp", "lower"):
        (at / name).mkdir()
    (at / "tmp").chmod(0o1777)
    (at / "lower" / "file").write_text("from the layer\n")
    (at / "lower" / "mine").write_text("uid 1000's\n")
    os.chown(at / "lower" / "mine", 1000, 1000)
    shutil.copy(busybox, at / "bin" / "busybox")
    for name in APPLETS:
        (at / "bin" / name).symlink_to("busybox")
    for name in PROGRAMS:
        shutil.copy(NATIVE / "build" / name, at / "bin" / name)
    return at


@contextlib.contextmanager
def _layer(base: Path) -> Iterator[Path]:
    image, place = base / "layer.erofs", base / "layer"
    made = subprocess.run(
        ["mkfs.erofs", "--quiet", image, _image(base / "image")], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mkfs.erofs: {made.stderr}")
    place.mkdir()
    try:
        mount = syscalls.new_mount("erofs", [("source", str(image))])
    except OSError as error:
        pytest.skip(f"this host cannot mount an EROFS file: {error}")
    syscalls.move_mount(mount, place)
    os.close(mount)
    try:
        yield place
    finally:
        syscalls.unmount(place, detach=True)


def _parent_group(hierarchy: Path) -> Path:
    group = hierarchy / f"barchan-test-{os.getpid()}"
    group.mkdir()
    return group


@contextlib.contextmanager
def open_site(base: Path) -> Iterator[Site]:
    if os.geteuid():
        pytest.skip("making containers needs root")
    build_programs()
    with contextlib.ExitStack() as stack:
        layer = stack.enter_context(_layer(base))
        unified = next(
            (p for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()), None
        )
        if unified is None:
            pytest.skip("no cgroup2 hierarchy is mounted")
        groups = _parent_group(unified)
        stack.callback(groups.rmdir)
        v1 = None
        if Path("/sys/fs/cgroup/pids/cgroup.procs").exists():
            v1 = _parent_group(Path("/sys/fs/cgroup/pids"))
            stack.callback(v1.rmdir)
        yield Site(base, layer, groups, v1)


async def alive(box: Box) -> str:
    """It answers within the time limit: "alive"."""
    return await asyncio.wait_for(box.sh("echo alive"), 10)


class Inside:
    """The real guest of a box: one call per operation, on one connection."""

    def __init__(self, box: Box) -> None:
        self.link = Link(str(box.path))
        self.last = self.link.hello().last
        self.out = b""

    def sh(self, script: str) -> str:
        """Output of a script of root's that must succeed. Changes are made in here: overlayfs need not see others."""
        done = self.program("/bin/sh", "-ec", script)
        assert done.code == 0 and not done.detail, (script, done)
        return self.out.decode()

    def call(self, kind: OpKind, *parts: bytes, user: bytes = b"", data: bytes | None = None) -> Done:
        self.last += 1
        result = self.link.start(self.last, kind, *parts, user=user)
        if data is not None:
            self.link.feed(self.last, data)
        done = self.link.wait(self.last)
        self.link.forget(self.last)
        self.out = result.stdout
        return done

    def program(self, *argv: str, cwd: str = "/", user: bytes = b"") -> Done:
        return self.call(OpKind.EXEC, exec_parts(*argv, cwd=cwd.encode()), user=user)


async def inside(site: Site, attempt: Callable[[Inside], None], flags: SpawnFlag = NO_FLAGS, **changes: Any) -> None:
    """Runs `attempt` in a thread, with the real guest; the cgroup directories are open to everybody."""
    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner, flags, **changes) as box:
        for group in (site.groups, box.group):
            group.chmod(0o755)

        def run() -> None:
            within = Inside(box)
            try:
                for user in (b"", b"1000:1000"):  # the first programs make the groups
                    assert within.program("/bin/true", user=user).code == 0
                for group in box.group.glob("x*"):
                    group.chmod(0o755)
                attempt(within)
            finally:
                within.link.close()

        await asyncio.to_thread(run)
