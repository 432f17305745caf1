"""One running command on the node: guest on one side, recorder and callers on the other.

    guest ──DATA──▶ recorder (write) ──▶ ACK        callers: live bytes at once, older ones from the log
    guest ──DONE──▶ recorder (sync)  ──▶ FORGET, REPLY to every caller

Bytes go to callers before they are recorded (the guest keeps them until the ACK, so a restarted agent delivers the
same ones); the result only after it is durable. The guest gets credit as far as the fastest attached caller takes
bytes, or a fixed window beyond what is recorded when nobody is attached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from barchan.backends.base import Usage
from barchan.errors import BarchanError, InternalError, ProtocolError
from barchan.node.channel import GuestChannel
from barchan.node.ends import Caller, Input, Output, Place, Reader
from barchan.node.recorder import Recorder
from barchan.spec import ExecResult, Terminal
from barchan.trajectory.index import ExecState
from barchan.wire import guest
from barchan.wire.frames import (
    STDERR,
    STDIN,
    STDOUT,
    U64,
    Frame,
    FrameType,
    Payload,
    decode_data,
    decode_eof,
    decode_u64,
    encode,
    encode_credit,
    encode_data,
    encode_eof,
)

logger = logging.getLogger(__name__)
OUTPUTS = (STDOUT, STDERR)
ACK_BYTES = 512 << 10
"""Recorded output of which the guest hears at once, because it may wait for room; of less in good time."""


END_SECONDS = 0.005
"""How long the end of an output waits for the end of the command."""


class Execution:
    """A command from its intent to its durable result. Made by `LiveSandbox`, one per operation id."""

    def __init__(
        self,
        sandbox: str,
        id: str,
        seq: int,
        recorder: Recorder,
        conclude: Callable[[guest.Done, Execution], Awaitable[ExecResult]],
    ) -> None:
        self.sandbox = sandbox
        self.id = id
        self.seq = seq
        self.pid = 0
        self.user = ""
        self.cwd = ""
        """What was asked for, for errors that name it."""
        self.takes_input = True
        self.before = Usage(0, 0)
        """The sandbox's counters when it was started, or taken up."""
        self.held = False
        """It was cancelled because it did not start."""
        self.input = Input()
        self._size: Terminal | None = None
        """What its terminal was set to last."""
        self._recorder = recorder
        self._conclude = conclude
        self._read: Callable[[int, int], AsyncIterator[bytes]] = partial(recorder.read_output, sandbox, id)
        self._channel: GuestChannel | None = None
        self.outputs = {stream: Output(stream) for stream in OUTPUTS}
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.result: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()
        self._callers: list[Caller] = []
        self._writes: set[asyncio.Future[int]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._telling = False

    @classmethod
    def from_log(cls, sandbox: str, state: ExecState, result: ExecResult, recorder: Recorder) -> Execution:
        """A command that ended: callers get its output from the log and its result."""

        async def never(done: guest.Done, execution: Execution) -> ExecResult:
            raise InternalError("this command has ended")

        ended = cls(sandbox, state.id, 0, recorder, never)
        ended._read = partial(recorder.pieces, state)
        for output, dropped in zip(ended.outputs.values(), (result.stdout_dropped, result.stderr_dropped), strict=True):
            output.received = output.recorded = state.recorded(output.stream)
            output.eof = (output.recorded + dropped, dropped)
        ended.started.set_result(0)
        ended.result.set_result(result)
        return ended

    # --- guest side

    def take_up(self, op: guest.KnownOp, state: ExecState, channel: GuestChannel) -> None:
        """On a new connection: go on from what is recorded, and send the input that the guest has not taken."""
        for output, recorded in zip(self.outputs.values(), (state.stdout, state.stderr), strict=True):
            output.recorded = max(output.recorded, recorded)
        self.input.recorded = max(self.input.recorded, state.stdin)
        self.input.end = self.input.recorded if state.stdin_ended else self.input.end
        self.input.sent = op.taken
        self._on_input_credit(op.taken + guest.INPUT_WINDOW)
        self._on_started(op.pid)
        self.bind(channel)
        if self._size is not None:
            channel.send(guest.resize(self.seq, self._size.rows, self._size.columns))
        if self.input.resending is not None:
            self.input.resending.cancel()
            self.input.resending = None
        if self.input.sent < self.input.recorded or self.input.end is not None:
            self.input.resending = asyncio.get_running_loop().create_task(self._resend_input())

    def bind(self, channel: GuestChannel) -> None:
        """Listen on a (new) connection and give credit on it."""
        self._channel = channel
        channel.listen(self.seq, self.on_guest)
        for output in self.outputs.values():
            output.granted = 0
            output.received = output.acknowledged = output.recorded
            if output.recorded:
                channel.send_frame(FrameType.ACK, self.seq, U64.pack(output.recorded), output.stream)
            self._grant(output)

    def on_guest(self, frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            self._on_data(frame)
        elif frame.type == FrameType.EOF:
            self._on_eof(frame)
        elif frame.type == FrameType.CREDIT:
            self._on_input_credit(decode_u64(frame.payload))
        elif frame.type == FrameType.STARTED:
            self._on_started(int.from_bytes(frame.payload[:4], "little"))
        elif frame.type == FrameType.DONE:
            self._on_done(guest.decode_done(frame.payload))
        elif frame.type == FrameType.REFUSED:
            _, text = guest.decode_refused(frame.payload)
            self.fail(InternalError(f"the guest refused the command: {text[:200]!r}"))

    def fail(self, error: BarchanError) -> None:
        """There will be no result: everybody waiting gets `error`."""
        for future in (self.started, self.result):
            if not future.done():
                future.set_exception(error)
                future.exception()

    def _on_started(self, pid: int) -> None:
        self.pid = pid
        if not self.started.done():
            self.started.set_result(pid)

    def _on_data(self, frame: Frame) -> None:
        output = self._output(frame.stream)
        offset, data = decode_data(frame.payload)
        if offset > output.received or offset + len(data) > output.granted or output.eof is not None:
            raise ProtocolError("the guest sent output out of turn")
        data = data[output.received - offset :]
        if not data:
            return
        offset = output.received
        output.received += len(data)
        for reader in output.readers:
            reader.offer(offset, data)
        write = self._recorder.output(self.sandbox, self.id, output.stream, offset, data)
        self._writes.add(write)
        write.add_done_callback(partial(self._written, output))

    def _written(self, output: Output, write: asyncio.Future[int]) -> None:
        self._writes.discard(write)
        if write.cancelled():
            return
        if (error := write.exception()) is not None:
            self.fail(error if isinstance(error, BarchanError) else InternalError(f"recording failed: {error}"))
            return
        output.recorded = write.result()
        for reader in output.readers:
            self._catch_up(output, reader)
        if self._channel is not None:
            with self._channel.together():
                self._acknowledge(output, self._channel)
                self._grant(output)

    def _acknowledge(self, output: Output, channel: GuestChannel) -> None:
        ack = encode(FrameType.ACK, self.seq, U64.pack(output.recorded), output.stream)
        if output.recorded - output.acknowledged >= ACK_BYTES:
            channel.send(ack)
        else:
            channel.send_later(ack)
        output.acknowledged = output.recorded

    def _on_eof(self, frame: Frame) -> None:
        output = self._output(frame.stream)
        total, dropped = decode_eof(frame.payload)
        if total - dropped != output.received:
            raise ProtocolError("the guest ended a stream at the wrong place")
        output.eof = (total, dropped)
        # Ends of output mostly come just before the end of the command, and then travel with its result.
        if any(output.readers for output in self.outputs.values()) and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(END_SECONDS, self._tell_ends)

    def _tell_ends(self) -> None:
        self._telling = False
        if self._ending is None:
            self.tell_ends()

    def tell_ends(self) -> None:
        """End the outputs of callers that have all of them."""
        for output in self.outputs.values():
            for reader in output.readers:
                self._finish(output, reader)

    def _on_done(self, done: guest.Done) -> None:
        if self._ending is None:
            if any(output.eof is None for output in self.outputs.values()):
                raise ProtocolError("the guest ended a command before its output")
            self._ending = asyncio.get_running_loop().create_task(self._end(done))

    async def _end(self, done: guest.Done) -> None:
        try:
            if self._writes:
                await asyncio.gather(*self._writes)
            result = await self._conclude(done, self)
        except BarchanError as error:
            self.fail(error)
            return
        except Exception as error:
            logger.exception("the end of command %s", self.id)
            self.fail(InternalError(f"{type(error).__name__}: {error}"))
            return
        if not self.started.done():
            self.started.set_result(self.pid)
        if not self.result.done():
            self.result.set_result(result)
        if self._channel is not None:
            self._channel.release(self.seq)

    def _output(self, stream: int) -> Output:
        if stream not in self.outputs:
            raise ProtocolError(f"the guest used stream {stream}")
        return self.outputs[stream]

    def _grant(self, output: Output) -> None:
        limit = output.wanted()
        if limit > output.granted and self._channel is not None:
            output.granted = limit
            self._channel.send(encode_credit(self.seq, output.stream, limit))

    # --- caller side

    def attach(self, caller: Caller, places: tuple[Place, Place]) -> tuple[Reader, Reader]:
        """Add a caller from the given places of the outputs. It gets bytes as far as it gives credit."""
        readers = (Reader(caller, STDOUT, places[0]), Reader(caller, STDERR, places[1]))
        for reader in readers:
            output = self.outputs[reader.stream]
            output.readers.append(reader)
            self._catch_up(output, reader)
            self._grant(output)
        self._callers.append(caller)
        if self.takes_input:
            caller.credit(STDIN, self.input.limit)
        return readers

    def detach(self, caller: Caller) -> None:
        """The caller is gone; the command goes on."""
        if caller in self._callers:
            self._callers.remove(caller)
        for output in self.outputs.values():
            for reader in output.readers:
                if reader.caller is caller and reader.catching_up is not None:
                    reader.catching_up.cancel()
            output.readers = [reader for reader in output.readers if reader.caller is not caller]
            self._grant(output)

    def take_credit(self, reader: Reader, limit: int) -> None:
        if limit > reader.limit:
            reader.limit = limit
            output = self.outputs[reader.stream]
            self._catch_up(output, reader)
            self._grant(output)

    async def take_input(self, offset: int, data: Payload) -> None:
        """Input from the caller: recorded, then handed to the guest."""
        self.input.recorded = await self._recorder.input(self.sandbox, self.id, offset, data)
        self._send_input(offset, data)

    async def end_input(self, total: int) -> None:
        await self._recorder.input_end(self.sandbox, self.id, total)
        self.input.end = total
        if self._channel is not None and self.input.resending is None:
            self._channel.send(encode_eof(self.seq, STDIN, total))

    def _send_input(self, offset: int, data: Payload) -> None:
        """Unless older input has to go first; then that brings this along."""
        if self._channel is not None and self.input.resending is None:
            self._channel.send(encode_data(self.seq, STDIN, offset, data))
            self.input.sent = offset + len(data)

    async def _resend_input(self) -> None:
        channel, input = self._channel, self.input
        while channel is not None and input.sent < input.recorded:
            async for data in self._read(STDIN, input.sent):
                channel.send(encode_data(self.seq, STDIN, input.sent, data))
                input.sent += len(data)
        input.resending = None
        if channel is not None and input.end is not None:
            channel.send(encode_eof(self.seq, STDIN, input.end))

    async def signal(self, number: int, everyone: bool) -> None:
        await self._recorder.signal(self.sandbox, self.id, number, everyone)
        if self._channel is not None:
            self._channel.send(guest.signal(self.seq, number, everyone))

    async def resize(self, size: Terminal) -> None:
        await self._recorder.resize(self.sandbox, self.id, size)
        self._size = size
        if self._channel is not None:
            self._channel.send(guest.resize(self.seq, size.rows, size.columns))

    def cancel(self) -> None:
        if self._channel is not None:
            self._channel.send_frame(FrameType.CANCEL, self.seq)

    @property
    def attached(self) -> bool:
        return bool(self._callers)

    def _on_input_credit(self, limit: int) -> None:
        if limit > self.input.limit:
            self.input.limit = limit
            for caller in self._callers:
                caller.credit(STDIN, limit)

    def _catch_up(self, output: Output, reader: Reader) -> None:
        """Send from the log what the reader missed, as far as its credit goes."""
        if reader.catching_up is None and reader.offset < min(output.recorded, reader.limit):
            reader.catching_up = asyncio.get_running_loop().create_task(self._replay(output, reader))
        else:
            self._finish(output, reader)

    async def _replay(self, output: Output, reader: Reader) -> None:
        try:
            while reader.offset < (end := min(output.recorded, reader.limit)):
                async for data in self._read(output.stream, reader.offset):
                    piece = data[: end - reader.offset]
                    reader.caller.send_data(output.stream, reader.offset, piece)
                    reader.offset += len(piece)
                    if reader.offset >= end:
                        break
        except BarchanError as error:
            reader.fail(error)
            return
        finally:
            reader.catching_up = None
        self._finish(output, reader)

    def has_all(self, reader: Reader) -> bool:
        """Whether its caller was sent everything there will be."""
        eof = self.outputs[reader.stream].eof
        return eof is not None and reader.catching_up is None and reader.offset == eof[0] - eof[1]

    def _finish(self, output: Output, reader: Reader) -> None:
        if output.eof is not None and self.has_all(reader):
            reader.end(*output.eof)
