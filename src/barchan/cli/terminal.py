"""A command on a terminal of its own, with ours attached to it: `-t`. Its bytes pass both ways as they are."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from barchan.cli.connect import program
from barchan.cli.interrupts import Interrupts
from barchan.errors import BarchanError, FileMissing
from barchan.spec import Exec, ExecResult, Terminal

if TYPE_CHECKING:
    from barchan.sdk import Sandbox, TerminalProcess

SHELLS = ("/bin/bash", "/bin/sh")


def size_of(fd: int) -> Terminal | None:
    """None if it is no terminal or does not know its size."""
    try:
        answer = fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
    except OSError:
        return None
    rows, columns, _, _ = struct.unpack("HHHH", answer)
    return Terminal(rows=rows, columns=columns) if rows and columns else None


def our_size() -> Terminal:
    return next((size for fd in (1, 0, 2) if (size := size_of(fd)) is not None), Terminal())


def our_kind() -> dict[bytes, bytes]:
    """What the terminal here is called. Empty where nothing says so."""
    kind = os.environb.get(b"TERM")
    return {b"TERM": kind} if kind else {}


@contextmanager
def raw(fd: int) -> Iterator[None]:
    """Every key goes through as a byte, ctrl-C too. The terminal is as before afterwards, whatever ends the block."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def followed(terminal: TerminalProcess, size: Terminal) -> Iterator[None]:
    """The command's terminal, which began with `size`, gets the size of ours whenever that changes."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    if our_size() != size:
        changed.set()
    following = loop.create_task(_follow_size(terminal, changed))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        following.cancel()


async def _follow_size(terminal: TerminalProcess, changed: asyncio.Event) -> None:
    """One change after another, so that the last one counts."""
    while True:
        await changed.wait()
        changed.clear()
        size = our_size()
        with suppress(BarchanError):  # it has ended, which its result says
            await terminal.resize(size.rows, size.columns)


async def shell_of(sandbox: Sandbox) -> bytes:
    """bash where there is one, else sh."""
    for path in SHELLS[:-1]:
        with suppress(FileMissing):
            if (await sandbox.files.stat(path)).mode & 0o111:
                return path.encode()
    return SHELLS[-1].encode()


async def drive(sandbox: Sandbox, request: Exec, interrupts: Interrupts) -> ExecResult:
    """Run a command on a terminal of the size of ours, with ours attached to it; without arguments it is a shell.

    Raises what kept output of ours from being written.
    """
    from barchan.cli.descriptors import Input, Output
    from barchan.cli.drive import Drive

    size = our_size()
    terminal = await _start(sandbox, request, size)
    copying = Drive(terminal, interrupts)
    outputs = ((aiter(terminal), Output(1).write),)
    with followed(terminal, size):
        if request.stdin:
            with raw(0):
                result = await copying.run(outputs, Input(0), Keyboard(terminal))
        else:
            terminal.end_input()
            result = await copying.run(outputs)
    if copying.output_failure is not None:
        raise copying.output_failure
    return result


async def _start(sandbox: Sandbox, request: Exec, size: Terminal) -> TerminalProcess:
    argv = request.argv or (await shell_of(sandbox),)
    given = program(request)
    given["env"] = our_kind() | request.env
    return await sandbox.tty(argv, rows=size.rows, columns=size.columns, **given)


class Keyboard:
    """What is typed here is typed there."""

    def __init__(self, terminal: TerminalProcess) -> None:
        self._terminal = terminal

    async def write(self, data: bytes, /) -> None:
        await self._terminal.write(data)

    def close(self) -> None:
        self._terminal.end_input()
