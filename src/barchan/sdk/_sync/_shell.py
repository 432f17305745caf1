# Generated from src/barchan/sdk/_shell.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""A shell session in a sandbox: command lines that share directory, variables and functions."""

from __future__ import annotations

import contextlib
from typing import Self

from barchan.errors import BarchanError, SandboxNotFound, SandboxStopped, SandboxUnavailable, ShellEnded
from barchan.sdk._results import CompletedExec
from barchan.sdk._sync import _compat
from barchan.sdk._sync._connection import Connection
from barchan.sdk._sync._exec import run_exec
from barchan.sdk._sync._process import Process, begin
from barchan.sdk._values import Text, to_bytes, value_of
from barchan.spec import MIB, Exec, ExecId, ExecResult
from barchan.wire.ids import new_exec_id
from barchan.wire.messages import CancelExec

OUTPUT_LIMIT = 64 * MIB
GONE = (SandboxNotFound, SandboxStopped, SandboxUnavailable)
"""There is nothing left to end."""


@_compat.exclusive
class Shell:
    """A shell that keeps what its commands leave behind: `with sandbox.shell() as shell`, or `open()` and `close()`.

    Calls wait their turn, in the order in which they were made. A command that ends the shell (`exit 3`) has the shell's end as its
    result; from then on every call raises `ShellEnded`, which says how it ended. A lost client leaves the session open.
    """

    def __init__(self, connection: Connection, sandbox: str, id_: str, request: Exec) -> None:
        self.id = ExecId(id_)
        """Of the session, in the sandbox's history."""
        self._connection = connection
        self._sandbox = sandbox
        self._request = request
        self._turn = _compat.Lock()
        self._before: str | None = None
        """A command of ours that may still run."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # What ended the block is what its author must see.
        with contextlib.suppress(BarchanError) if kind is not None else contextlib.nullcontext():
            self.close()

    def open(self) -> None:
        """Start the shell. Raises `ShellEnded` when its program cannot run or has ended, `UserNotFound`, `FileMissing` (`cwd`)."""
        process = begin(self._connection, self._sandbox, self.id, self._request)
        if not process.pid:
            raise _not_open(process.wait())
        process.detach()

    def run(
        self,
        command: Text,
        *,
        timeout: float | None = None,
        grace: float = 1.0,
        output_limit: int = OUTPUT_LIMIT,
        id: str | None = None,
        check: bool = False,
    ) -> CompletedExec:
        """Run a command line to its end. Arguments, result and errors as with `Sandbox.run`.

        The command reads end of file. After `timeout` seconds (of its own, its turn not counted), or when this call is cancelled,
        it is interrupted as by ctrl-C, and after `grace` seconds everything that it started is killed; the session goes on if the
        shell does. Raises `ShellEnded`, and `ShellBusy` when another client's command runs in the session.
        """
        request = self._line(command, timeout, grace, output_limit)
        id = id or new_exec_id()
        with self._turn:
            self._finish_before()
            self._before = id
            result = run_exec(self._connection, self._sandbox, id, request, None)
            self._before = None
        return result.check() if check else result

    def start(
        self,
        command: Text,
        *,
        timeout: float | None = None,
        grace: float = 1.0,
        output_limit: int = OUTPUT_LIMIT,
        id: str | None = None,
    ) -> Process:
        """Start a command line and return a handle as soon as it runs. The next call waits until it has ended."""
        request = self._line(command, timeout, grace, output_limit)
        id = id or new_exec_id()
        with self._turn:
            self._finish_before()
            self._before = id
            return begin(self._connection, self._sandbox, id, request)

    def close(self) -> None:
        """End the shell with everything that runs in it. Idempotent."""
        with contextlib.suppress(*GONE):
            request = CancelExec(sandbox=self._sandbox, id=self.id)
            self._connection.request(request, retry=True, timeout=None)
            begin(self._connection, self._sandbox, self.id, None).wait()

    def _line(self, command: Text, timeout: float | None, grace: float, output_limit: int) -> Exec:
        return value_of(
            Exec,
            argv=(to_bytes(command, "command"),),
            shell=self.id,
            timeout=timeout,
            grace=grace,
            output_limit=output_limit,
        )

    def _finish_before(self) -> None:
        """Wait for a command that was started, cancelled, or lost with the connection: the shell can take no other meanwhile."""
        if self._before is None:
            return
        with contextlib.suppress(BarchanError):
            begin(self._connection, self._sandbox, self._before, None).wait()
        self._before = None


def _not_open(end: ExecResult) -> ShellEnded:
    how = f"exit code {end.exit_code}" if end.outcome == "exited" else end.outcome.replace("_", " ")
    return ShellEnded(f"the shell is not running: {how}", field="program")
