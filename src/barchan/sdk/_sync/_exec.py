# Generated from src/barchan/sdk/_exec.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""One command's calls, over as many connections as it takes. What `run` and `Process` have in common."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from barchan.errors import BarchanError, InvalidRequest
from barchan.sdk._results import CompletedExec
from barchan.sdk._sync import _compat
from barchan.sdk._sync._connection import TRANSIENT, Connection, Patience, answer
from barchan.sdk._sync._streams import CallStreams, Taking
from barchan.sdk._values import checked_piece, packed
from barchan.spec import Exec, ExecResult, check_exec
from barchan.wire.frames import STDERR, STDOUT, Frame, FrameType
from barchan.wire.messages import AttachExec, CancelExec, ExecStarted, Request, StartExec, unpack

Input = bytes | bytearray | memoryview | str | Iterable[bytes]


class ExecCall:
    """Follows one command to its result. `exec_` None attaches to one that exists."""

    def __init__(
        self,
        connection: Connection,
        sandbox: str,
        id_: str,
        exec_: Exec | None,
        streams: CallStreams,
        *,
        quiet: bool = False,
    ) -> None:
        """`quiet`: nobody waits for its start."""
        self.id = id_
        self.pid = 0
        self.streams = streams
        self.begun = _compat.Event()
        """Set once it runs, or has ended, or failed to be followed."""
        self.ran = False
        """Whether anything was heard of it."""
        self.failure: BarchanError | None = None
        self._connection = connection
        self._sandbox = sandbox
        self._exec = None if exec_ is None else check_exec(exec_)
        self._quiet = quiet
        self._patience = Patience(connection.reconnect)
        self._asked = False
        streams.on_event = self._started

    def follow(self) -> ExecResult:
        """The result, taking the command up again after each loss of the connection or the node."""
        try:
            while True:
                try:
                    result = self._once()
                except TRANSIENT as error:
                    self.streams.detach()
                    if not self._asked or self._connection.closed:
                        raise
                    self._patience.wait(error)
                else:
                    self.streams.finish(result.outputs)
                    return result
        except BarchanError as error:
            self.failure = error
            self.streams.fail(error)
            raise
        finally:
            self.begun.set()

    def _once(self) -> ExecResult:
        link = self._connection.link()
        self._asked = True  # from here on an interrupt leaves a command to cancel
        call = link.call(packed(self._request()), self._on_frame)
        self.streams.attach(call, credited=True)
        return unpack(answer(call), ExecResult)

    def _request(self) -> Request:
        out, err = self.streams.stdout, self.streams.stderr
        if self._exec is None:
            return AttachExec(
                sandbox=self._sandbox,
                id=self.id,
                stdout_offset=out.offset,
                stderr_offset=err.offset,
                stdout_limit=out.credit(),
                stderr_limit=err.credit(),
            )
        return StartExec(
            sandbox=self._sandbox,
            id=self.id,
            exec=self._exec,
            stdout_offset=out.offset,
            stderr_offset=err.offset,
            stdout_limit=out.credit(),
            stderr_limit=err.credit(),
            quiet=self._quiet,
        )

    def _on_frame(self, frame: Frame) -> None:
        # A command with output has begun, whatever its node says or leaves out. An end alone also comes of one that could
        # not start; there, the answer follows without a reader.
        if frame.type == FrameType.DATA and not self.begun.is_set():
            self._patience.reset()
            self.ran = True
            self.begun.set()
        self.streams.on_frame(frame)

    def _started(self, payload: bytes) -> None:
        event = unpack(payload, ExecStarted)
        self.pid = event.pid
        self._patience.reset()
        self.streams.stdin.resume(event.stdin_offset)
        self.ran = True
        self.begun.set()

    def cancel(self) -> None:
        """End the command, best effort and without waiting."""
        if self._asked:
            self._connection.post(CancelExec(sandbox=self._sandbox, id=self.id))


def run_exec(connection: Connection, sandbox: str, id_: str, exec_: Exec, stdin: Input | None) -> CompletedExec:
    """Run to the end, collecting output. Cancelling this cancels the command."""
    if stdin is not None and not isinstance(stdin, (str, bytes, bytearray, memoryview, Iterable)):
        raise InvalidRequest(
            f"stdin: {type(stdin).__name__} is no input", field="stdin", hint="bytes, str or an iterable of bytes"
        )
    streams = CallStreams(outputs=(STDOUT, STDERR), taking=Taking.COLLECT)
    call = ExecCall(connection, sandbox, id_, exec_, streams, quiet=stdin is None)
    feeder = None if stdin is None else _compat.spawn(connection.tasks, _feed, call, stdin)
    try:
        result = call.follow()
    except _compat.Cancelled:
        call.cancel()
        raise
    finally:
        if feeder is not None and not feeder.done():
            feeder.cancel()
    if feeder is not None and feeder.done() and not feeder.cancelled():
        feeder.result()
    return CompletedExec(
        **msgspec.structs.asdict(result), stdout=streams.stdout.collected(), stderr=streams.stderr.collected()
    )


def _feed(call: ExecCall, source: Input) -> None:
    """A source that fails ends the command: half an input must not look like all of it."""
    sender = call.streams.stdin
    try:
        if isinstance(source, (str, bytes, bytearray, memoryview)):
            sender.write(source.encode() if isinstance(source, str) else source)
        else:
            for piece in _compat.source(source):
                sender.write(checked_piece(piece, "stdin"))
        sender.eof()
    except Exception as error:
        if error is call.failure:
            return
        call.cancel()
        raise
