"""A terminal of a test's own, with a command of ours on it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import Any, Self

SECONDS = 30.0


class LocalTerminal:
    """`with LocalTerminal(argv) as terminal`: the command has it as its controlling terminal, and is killed at the end."""

    def __init__(self, argv: Sequence[str], *, rows: int = 30, columns: int = 100) -> None:
        self._master, self._slave = pty.openpty()
        self._argv = argv
        self.resize(rows, columns)
        self.before = self.settings()
        self.seen = bytearray()
        self._searched = 0

    def __enter__(self) -> Self:
        on_it: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        self.process = subprocess.Popen(["setsid", "--ctty", *self._argv], **on_it)
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def settings(self) -> list[Any]:
        """Whether it is raw, echoes, and so on."""
        return termios.tcgetattr(self._slave)

    @property
    def raw(self) -> bool:
        return not self.settings()[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def until(self, text: bytes) -> bytes:
        """Wait until `text` is shown, after what was waited for before. Returns what was shown up to its end."""
        deadline = time.monotonic() + SECONDS
        while (at := self.seen.find(text, self._searched)) < 0:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {bytes(self.seen[self._searched :])!r}"
            self.seen += os.read(self._master, 1 << 16)
        start, self._searched = self._searched, at + len(text)
        return bytes(self.seen[start : self._searched])

    def wait(self) -> int:
        """The command's exit code."""
        return self.process.wait(SECONDS)
