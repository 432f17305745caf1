"""A Debian kernel under QEMU without hardware help (TCG), for what must not or cannot be tried on the host itself.

    with boot(fetch("bookworm"), directory) as machine:
        done = machine.run("uname -r")

Slow (some ten times slower than the host) and safe: whatever happens inside ends with one process. A machine is for one
caller at a time.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.debian import Unavailable
from tests.vm import initrd
from tests.vm.kernel import Kernel

MIB = 1 << 20
PROGRAM = "qemu-system-x86_64"
BOOT = 180.0
"""Seconds until the agent must have answered; 3 to 15 are usual on an idle host."""
LARGEST = 64 * MIB
"""Of the output of one script."""
_OPTIONS = (
    "-accel", "tcg,tb-size=128", "-cpu", "max", "-M", "microvm,acpi=on,pit=on,pic=on,rtc=on", "-nodefaults", "-no-user-config",
    "-no-reboot", "-display", "none", "-device", "virtio-serial-device",
)  # fmt: skip
_COMMAND_LINE = (
    "console=ttyS0 quiet reboot=t panic=-1 nokaslr mitigations=off cryptomgr.notests random.trust_cpu=on"
    " rcupdate.rcu_expedited=1"
)


class Stuck(Exception):
    """The machine ended or did not answer in time; the text has the end of its console."""


@dataclass(frozen=True)
class Disk:
    """A raw image. `name` is what the guest finds it by."""

    name: str
    path: Path
    writable: bool = False


@dataclass(frozen=True)
class Done:
    code: int
    output: str


class Machine:
    """A running machine; made by `boot`."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, console: Path) -> None:
        self._process = process
        self._link = link
        self._console = console
        self._buffer = b""

    def run(self, script: str, timeout: float = 60) -> Done:
        """Run a shell script as root. `Stuck` after `timeout` seconds; the machine is of no use then."""
        raw = script.encode()
        self._send(b"run %d\n%s" % (len(raw), raw))
        end = time.monotonic() + timeout
        code, size = map(int, self._line(end).split())
        if size > LARGEST:
            raise Stuck(f"a script printed {size} bytes")
        return Done(code, self._exactly(size, end).decode(errors="replace"))

    def check(self, script: str, timeout: float = 60) -> str:
        """Output of a script that must succeed."""
        done = self.run(script, timeout)
        assert done.code == 0, f"{script}\n{done.output[-6000:]}"
        return done.output

    def put(self, path: str, data: bytes) -> None:
        """Write a file of a few MB at most."""
        self._send(b"put %d %s\n%s" % (len(data), path.encode(), data))
        assert self._line(time.monotonic() + 60).split()[0] == b"0", path

    def crash(self, script: str, timeout: float = 60) -> str:
        """Run a script that ends the machine; the end of the console."""
        raw = script.encode()
        self._send(b"run %d\n%s" % (len(raw), raw))
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise Stuck(f"still running: {self.console()}") from error
        return self.console()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def console(self) -> str:
        """What the kernel printed last."""
        return self._console.read_text(errors="replace")[-4000:] if self._console.exists() else ""

    def wait_ready(self, timeout: float) -> None:
        if self._line(time.monotonic() + timeout) != b"ready":
            raise Stuck(self.console())

    def _send(self, data: bytes) -> None:
        try:
            self._link.sendall(data)
        except OSError as error:
            raise Stuck(f"the machine is gone: {self.console()}") from error

    def _line(self, end: float) -> bytes:
        while b"\n" not in self._buffer:
            self._receive(end)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _exactly(self, size: int, end: float) -> bytes:
        while len(self._buffer) < size:
            self._receive(end)
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _receive(self, end: float) -> None:
        self._link.settimeout(max(end - time.monotonic(), 0.001))
        try:
            data = self._link.recv(MIB)
        except TimeoutError as error:
            raise Stuck(f"no answer in time: {self.console()}") from error
        except OSError as error:
            raise Stuck(f"the machine is gone: {self.console()}") from error
        if not data:
            raise Stuck(f"the machine ended: {self.console()}")
        self._buffer += data


@contextlib.contextmanager
def boot(kernel: Kernel, directory: Path, disks: tuple[Disk, ...] = (), memory: int = 256 * MIB) -> Iterator[Machine]:
    """Boot and wait for the agent. With a disk called `base` its Debian is the root, otherwise busybox alone.

    `Unavailable` where this host cannot run it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    first = directory / "initrd"
    first.write_bytes(initrd.build(kernel.modules, kernel.more))
    here, there = socket.socketpair()
    with here, contextlib.ExitStack() as stack:
        with there, (directory / "errors").open("wb") as errors:
            command = [*_program(), *_arguments(kernel, first, disks, memory, there.fileno())]
            process = subprocess.Popen(
                command, cwd=directory, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        stack.callback(_end, process)
        machine = Machine(process, here, directory / "console")
        machine.wait_ready(BOOT)
        yield machine


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _program() -> tuple[str, ...]:
    if platform.machine() != "x86_64":
        raise Unavailable("test machines are x86-64")
    if shutil.which(PROGRAM) is None:
        raise Unavailable(f"{PROGRAM} is missing: install qemu-system-x86")
    # A killed test run must not leave machines behind.
    return ("setpriv", "--pdeathsig", "KILL", PROGRAM)


def _arguments(kernel: Kernel, first: Path, disks: tuple[Disk, ...], memory: int, link: int) -> Iterator[str]:
    yield from _OPTIONS
    yield from ("-m", f"{memory // MIB}", "-serial", "file:console")
    yield from ("-kernel", str(kernel.image), "-initrd", str(first))
    yield from ("-append", f"{_COMMAND_LINE} tsc_early_khz={tsc_khz()}")
    yield from ("-chardev", f"socket,id=agent,fd={link}", "-device", "virtserialport,chardev=agent,name=agent")
    for disk in disks:
        mode = "cache=unsafe" if disk.writable else "readonly=on"
        yield from ("-drive", f"id={disk.name},if=none,format=raw,{mode},file={disk.path}")
        yield from ("-device", f"virtio-blk-device,drive={disk.name},serial={disk.name}")


def tsc_khz() -> int:
    """Of this host: a guest that has to measure it while the host is busy hangs at random."""
    found = re.search(r"^bogomips\s*:\s*(\d+(?:\.\d+)?)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return int(float(found[1]) * 500) if found else 2_000_000
