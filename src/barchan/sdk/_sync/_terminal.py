# Generated from src/barchan/sdk/_terminal.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""A handle on a command that runs on a terminal of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

from barchan.errors import BarchanError, SandboxNotFound, SandboxStopped, SandboxUnavailable
from barchan.sdk._sync import _compat
from barchan.sdk._sync._connection import Connection
from barchan.sdk._sync._process import Process
from barchan.sdk._values import value_of
from barchan.spec import ExecId, ExecResult, Terminal, check_terminal
from barchan.wire.messages import ResizeExec

OUTPUT_LIMIT = 1 << 30
"""Of a terminal, where nobody expects the output to stop."""


@_compat.exclusive
class TerminalProcess:
    """A command on a terminal: `with sandbox.tty(["bash"]) as terminal`, which ends it with the block.

    What it shows comes as bytes, with every control sequence: `for chunk in terminal`, or `read()`. At most 1 MiB is buffered,
    then the program waits for its reader. Like a `Process` it does not depend on this handle, and is taken up again after a lost
    connection.
    """

    def __init__(self, connection: Connection, sandbox: str, process: Process) -> None:
        self._connection = connection
        self._sandbox = sandbox
        self._process = process

    @property
    def id(self) -> ExecId:
        """Of the command, in the sandbox's history."""
        return self._process.id

    @property
    def pid(self) -> int:
        """As seen inside the sandbox; 0 when it never ran."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # What ended the block is what its author must see.
        with contextlib.suppress(BarchanError) if kind is not None else contextlib.nullcontext():
            self.close()

    def write(self, data: bytes | str) -> None:
        """Type: `b"\\x03"` is ctrl-C, `b"\\x04"` ctrl-D. Waits while the terminal takes no more. One writer at a time."""
        self._process.stdin.write(data)

    def end_input(self) -> None:
        """Nothing more will be typed: the program reads end of file. Idempotent."""
        self._process.stdin.close()

    def read(self) -> bytes:
        """The next bytes as they come, or b"" at the end. Raises the error that ended the stream early."""
        return self._process.stdout.read()

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read():
            yield chunk

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size; programs in its foreground get SIGWINCH. Raises `ExecNotFound` after its end."""
        size = check_terminal(value_of(Terminal, rows=rows, columns=columns))
        request = ResizeExec(sandbox=self._sandbox, id=self.id, size=size)
        self._connection.request(request, retry=True, timeout=None)

    def signal(self, number: int, *, everyone: bool = False) -> None:
        """Send a signal to the main process's group, or to every process of the command."""
        self._process.signal(number, everyone=everyone)

    def wait(self) -> ExecResult:
        """How it ended. Output that nobody has begun to read does not hold it up: see `ProcessOutput`."""
        return self._process.wait()

    def cancel(self) -> None:
        """End the command with all its processes; its outcome is `cancelled`. Idempotent."""
        self._process.cancel()

    def close(self) -> None:
        """End the command if it runs, and wait for its end. Idempotent."""
        with contextlib.suppress(SandboxNotFound, SandboxStopped, SandboxUnavailable):
            self.cancel()
            self.wait()

    def detach(self) -> None:
        """Stop following; the command runs on. Nothing else of this handle must be used any more."""
        self._process.detach()
