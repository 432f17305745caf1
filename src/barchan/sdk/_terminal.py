"""A handle on a command that runs on a terminal of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Self

from barchan.errors import BarchanError, SandboxNotFound, SandboxStopped, SandboxUnavailable
from barchan.sdk import _compat
from barchan.sdk._connection import Connection
from barchan.sdk._process import Process
from barchan.sdk._values import value_of
from barchan.spec import ExecId, ExecResult, Terminal, check_terminal
from barchan.wire.messages import ResizeExec

OUTPUT_LIMIT = 1 << 30
"""Of a terminal, where nobody expects the output to stop."""


@_compat.exclusive
class TerminalProcess:
    """A command on a terminal: `async with await sandbox.tty(["bash"]) as terminal`, which ends it with the block.

    What it shows comes as bytes, with every control sequence: `async for chunk in terminal`, or `read()`. At most 1 MiB is buffered,
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # What ended the block is what its author must see.
        with contextlib.suppress(BarchanError) if kind is not None else contextlib.nullcontext():
            await self.close()

    async def write(self, data: bytes | str) -> None:
        """Type: `b"\\x03"` is ctrl-C, `b"\\x04"` ctrl-D. Waits while the terminal takes no more. One writer at a time."""
        await self._process.stdin.write(data)

    def end_input(self) -> None:
        """Nothing more will be typed: the program reads end of file. Idempotent."""
        self._process.stdin.close()

    async def read(self) -> bytes:
        """The next bytes as they come, or b"" at the end. Raises the error that ended the stream early."""
        return await self._process.stdout.read()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size; programs in its foreground get SIGWINCH. Raises `ExecNotFound` after its end."""
        size = check_terminal(value_of(Terminal, rows=rows, columns=columns))
        request = ResizeExec(sandbox=self._sandbox, id=self.id, size=size)
        await self._connection.request(request, retry=True, timeout=None)

    async def signal(self, number: int, *, everyone: bool = False) -> None:
        """Send a signal to the main process's group, or to every process of the command."""
        await self._process.signal(number, everyone=everyone)

    async def wait(self) -> ExecResult:
        """How it ended. Output that nobody has begun to read does not hold it up: see `ProcessOutput`."""
        return await self._process.wait()

    async def cancel(self) -> None:
        """End the command with all its processes; its outcome is `cancelled`. Idempotent."""
        await self._process.cancel()

    async def close(self) -> None:
        """End the command if it runs, and wait for its end. Idempotent."""
        with contextlib.suppress(SandboxNotFound, SandboxStopped, SandboxUnavailable):
            await self.cancel()
            await self.wait()

    def detach(self) -> None:
        """Stop following; the command runs on. Nothing else of this handle must be used any more."""
        self._process.detach()
