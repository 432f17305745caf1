# Generated from src/barchan/sdk/_process.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""A handle on a command that runs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterator

from barchan.sdk._sync import _compat
from barchan.sdk._sync._connection import Connection
from barchan.sdk._sync._exec import ExecCall
from barchan.sdk._sync._streams import ByteReceiver, ByteSender, CallStreams, Taking
from barchan.spec import Exec, ExecId, ExecResult
from barchan.wire.frames import STDERR, STDOUT
from barchan.wire.messages import CancelExec, SignalExec

SIGKILL = 9


@_compat.exclusive
class ProcessOutput:
    """One output of a command: `for chunk in process.stdout`, or `read()`.

    At most 1 MiB is buffered; then the program waits for its reader, in the sandbox. An output that nobody has begun to
    read when `wait()` is called does not hold the program up: its first 1 MiB stays readable, what follows is thrown away and
    counted in `unread`.
    """

    def __init__(self, receiver: ByteReceiver) -> None:
        self._receiver = receiver
        self._touched = False

    @property
    def unread(self) -> int:
        """Bytes thrown away because nobody read."""
        return self._receiver.unread

    @property
    def offset(self) -> int:
        """Bytes received; where `Sandbox.attach` can take up from when all of them were read."""
        return self._receiver.offset

    def read(self) -> bytes:
        """The next bytes as they come, or b"" at the end. Raises the error that ended the stream early."""
        if not self._touched:
            self._touched = True
            self._receiver.take(Taking.BUFFER)
        return self._receiver.read()

    def read_all(self) -> bytes:
        """Everything up to the end, in memory."""
        parts = [chunk for chunk in self]
        return b"".join(parts)

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read():
            yield chunk

    def let_go(self) -> None:
        """Unless somebody reads it, keep only its beginning from here on. `wait()` does this."""
        if not self._touched:
            self._receiver.take(Taking.PREFIX)


@_compat.exclusive
class ProcessInput:
    """Standard input of a command that was started with `stdin=True`. One writer at a time."""

    def __init__(self, sender: ByteSender) -> None:
        self._sender = sender

    def write(self, data: bytes | str) -> None:
        """Returns when the bytes are on their way; waits while the program does not read. After its end they go nowhere."""
        self._sender.write(data.encode() if isinstance(data, str) else data)

    def close(self) -> None:
        """End of file. Idempotent."""
        self._sender.eof()


@_compat.exclusive
class Process:
    """A command in a sandbox. It does not depend on this handle: dropping it, or losing the connection, lets it run on.

    After a lost connection it is taken up again without a gap. When that fails for `Client(reconnect=…)` seconds, readers and
    `wait()` get `ApiUnavailable` or `NodeUnavailable`; `Sandbox.attach` may be tried later.
    """

    def __init__(self, connection: Connection, sandbox: str, call: ExecCall) -> None:
        self.id = ExecId(call.id)
        self.stdin = ProcessInput(call.streams.stdin)
        self.stdout = ProcessOutput(call.streams.stdout)
        self.stderr = ProcessOutput(call.streams.stderr)
        self._connection = connection
        self._sandbox = sandbox
        self._call = call
        self._following = _compat.spawn(connection.tasks, call.follow)

    def __repr__(self) -> str:
        return f"<Process {self.id} in {self._sandbox} {'ended' if self._following.done() else 'running'}>"

    @property
    def pid(self) -> int:
        """As seen inside the sandbox; 0 when it never ran or had ended before it was attached."""
        return self._call.pid

    def wait(self) -> ExecResult:
        """How it ended. May be called often and by many. See `ProcessOutput` for outputs that nobody reads."""
        self.stdout.let_go()
        self.stderr.let_go()
        return _compat.joined(self._following)

    def signal(self, number: int, *, everyone: bool = False) -> None:
        """Send a signal to the main process's group, or to every process of the command."""
        request = SignalExec(sandbox=self._sandbox, id=self.id, signal=number, everyone=everyone)
        self._connection.request(request, retry=False, timeout=None)

    def kill(self) -> None:
        """SIGKILL to every process of the command."""
        self.signal(SIGKILL, everyone=True)

    def cancel(self) -> None:
        """End the command with all its processes; its outcome is `cancelled`. Idempotent."""
        self._connection.request(CancelExec(sandbox=self._sandbox, id=self.id), retry=True, timeout=None)

    def detach(self) -> None:
        """Stop following; the command runs on. `wait()` and readers must not be used any more."""
        self._following.cancel()


def begin(
    connection: Connection,
    sandbox: str,
    id_: str,
    exec_: Exec | None,
    *,
    stdout_offset: int = 0,
    stderr_offset: int = 0,
) -> Process:
    """A handle once the command runs (or could not be run: its result says so). Raises what prevented it."""
    streams = CallStreams(outputs=(STDOUT, STDERR), stdout_offset=stdout_offset, stderr_offset=stderr_offset)
    call = ExecCall(connection, sandbox, id_, exec_, streams)
    process = Process(connection, sandbox, call)
    try:
        call.begun.wait()
    except _compat.Cancelled:
        process.detach()
        if exec_ is not None:
            call.cancel()
        raise
    if call.failure is not None and not call.ran:
        process.wait()
    return process
