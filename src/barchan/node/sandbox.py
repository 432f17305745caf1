"""One live sandbox on the node: its channel, its running commands, its file operations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from barchan.backends.base import Backend, Populated, Usage
from barchan.errors import (
    BarchanError,
    ExecNotFound,
    OutcomeUnknown,
    ProtocolError,
    SandboxUnavailable,
    ShellEnded,
)
from barchan.images import ROOT, TOP
from barchan.node import outcome
from barchan.node.channel import GuestChannel
from barchan.node.ends import Caller, Reader, places_of
from barchan.node.execution import Execution
from barchan.node.info import beginning
from barchan.node.operation import Collector, Operation
from barchan.node.recorder import Recorder
from barchan.node.requests import encode_exec, encode_file, encode_run
from barchan.node.shells import Shells
from barchan.spec import Exec, ExecId, ExecResult, Outcome, ProcessInfo, SandboxSpec, check_exec
from barchan.wire import guest
from barchan.wire import messages as m
from barchan.wire.frames import STDOUT, U64, Frame, FrameType
from barchan.wire.guest import OpKind, Welcome

logger = logging.getLogger(__name__)

PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TERM = b"xterm-256color"
REDIALS = 5
REDIAL_SECONDS = 0.2
MOST_PROCESS_BYTES = 64 << 20
MOST_PROCESSES, ARGV_SHOWN = 2000, 256
"""What fits one answer, whatever a sandbox does to its processes' arguments."""
START_SECONDS = 10.0
"""A command that does not start within this makes the node ask whether the guest still lives."""


class LiveSandbox:
    """Made when the sandbox answers, or when it is adopted; gone when it stops."""

    def __init__(
        self,
        id: str,
        spec: SandboxSpec,
        secrets: dict[str, str],
        backend: Backend,
        recorder: Recorder,
        on_broken: Callable[[str, str], None],
    ) -> None:
        self.id = id
        self.spec = spec
        self._user, self._workdir = spec.user or ROOT, (spec.workdir or TOP).encode()
        self._env = {k.encode(): v.encode() for k, v in {**spec.env, **secrets}.items()}
        self._backend = backend
        self._recorder = recorder
        self._on_broken = on_broken
        self._channel: GuestChannel | None = None
        self._executions: dict[str, Execution] = {}
        self._shells = Shells(id, recorder, self._executions)
        self._starting: dict[str, float] = {}
        self._operations: set[Operation] = set()
        self.packings = 0
        """Of its changes, under way."""
        self.known: asyncio.Future[None] | None = None
        """Its claim, if it may not be on disk yet: a result is worth nothing without it."""
        self._unused: Usage | None = None
        """Counters as no command has changed them yet."""
        self._redials = 0
        self._redialling: asyncio.Task[None] | None = None
        self._closed: BarchanError | None = None

    # --- the link

    async def connect(self) -> None:
        """Dial, greet, and take up what the guest knows. Raises `SandboxUnavailable`."""
        # Not asked of the transport, which has none any more when the guest hung up meanwhile.
        channel = GuestChannel(self._lost)
        try:
            await self._backend.connect(self.id, lambda: channel)
        except OSError as error:
            raise SandboxUnavailable(f"cannot reach the guest: {error}", phase="connect") from error
        welcome = await channel.greet()
        self._channel = channel
        self._unused = self._backend.usage(self.id) if welcome.last else Usage(0, 0)
        await self._resume(channel, welcome)
        channel.deliver()

    async def _resume(self, channel: GuestChannel, welcome: Welcome) -> None:
        """Bind the commands that the guest knows, start those it never saw, drop the rest."""
        known = {op.id: op for op in welcome.ops}
        for state in self._recorder.running(self.id):
            execution = self._executions.get(state.id) or self._execution(state.id, state.seq)
            self._executions[state.id] = execution
            op = known.pop(state.seq, None)
            if op is not None:
                execution.take_up(op, state, channel)
            elif state.seq > welcome.last:
                await self._start_late(execution)
            else:
                await self._give_up(state.id, "unknown", OutcomeUnknown("the guest does not know it any more"))
        for left in known.values():
            channel.send_frame(FrameType.CANCEL, left.id)
            channel.send_frame(FrameType.FORGET, left.id)

    async def _start_late(self, execution: Execution) -> None:
        """Its intent is recorded, the guest never saw it. Secrets are not in the record, so with them it cannot run."""
        request = await self._recorder.request(self.id, execution.id)
        if request.secrets:
            error = OutcomeUnknown("it was not started; its secrets are gone", hint="send it again with a new id")
            await self._give_up(execution.id, "not_started", error)
        else:
            self._send_start(execution, request)

    def close(self, error: BarchanError) -> None:
        """Fail everything that waits. The guest is not told; idempotent."""
        self._closed = self._closed or error
        if self._redialling is not None:
            self._redialling.cancel()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()
        for execution in list(self._executions.values()):
            execution.fail(error)
        for operation in list(self._operations):
            operation.fail(error)

    def _lost(self, channel: GuestChannel, error: Exception) -> None:
        if self._closed is not None or channel is not self._channel:
            return
        self._channel = None
        for operation in list(self._operations):
            operation.fail(SandboxUnavailable("the link to the guest broke; send it again", phase="link"))
        self._redials += 1
        if isinstance(error, ProtocolError) or self._redials > REDIALS:
            self._on_broken(self.id, f"its guest cannot be trusted any more: {error}")
        else:
            self._redialling = asyncio.get_running_loop().create_task(self._redial())

    async def _redial(self) -> None:
        """A guest that dies hangs up a moment before its end is seen: then `close` ends this."""
        for _ in range(REDIALS):
            try:
                return await self.connect()
            except BarchanError as error:
                last = error
            await asyncio.sleep(REDIAL_SECONDS)
        self._on_broken(self.id, f"its guest does not answer: {last}")

    def _live_channel(self) -> GuestChannel:
        if self._closed is not None:
            raise self._closed
        if self._channel is None:
            raise SandboxUnavailable("the guest is not connected", phase="link")
        return self._channel

    async def check(self) -> None:
        """Ask the guest for a sign of life if a command is slow to start, and end what does not start at all.

        Without an answer the sandbox is given up, unless the guest wants to run and the limit of CPU time keeps it from that.
        """
        late = time.monotonic() - START_SECONDS
        if self._channel is None or not any(since < late for since in self._starting.values()):
            return
        for id, since in self._starting.items():
            if since < late - START_SECONDS and id in self._executions:
                self._executions[id].held = True
                self._executions[id].cancel()
        waited = self._throttled()
        try:
            await self._channel.ping(START_SECONDS)
        except SandboxUnavailable as error:
            if not self._starved(waited):
                self._on_broken(self.id, str(error))

    def _throttled(self) -> float:
        return self._backend.throttled(self.id) if isinstance(self._backend, Populated) else 0.0

    def _starved(self, waited: float) -> bool:
        backend = self._backend
        return isinstance(backend, Populated) and backend.runnable(self.id) and backend.throttled(self.id) > waited

    @property
    def busy(self) -> bool:
        """Whether a caller is attached to a command, or something else is under way. A shell session alone is neither."""
        return bool(self._operations or self.packings) or any(
            e.attached for e in self._executions.values() if e.id not in self._shells
        )

    # --- commands

    async def start(self, request: m.StartExec, caller: Caller) -> tuple[Execution, tuple[Reader, Reader]]:
        """Start it, or take up the one with this id. Raises `Conflict` when the id had another request.

        A command line in a shell session also raises what `Shells.check` does.
        """
        self._live_channel()
        exec_ = check_exec(request.exec)
        if exec_.shell is not None and self._recorder.exec_state(self.id, request.id) is None:
            await self._shells.check(exec_.shell)
        attached: list[tuple[Execution, tuple[Reader, Reader]]] = []

        def send(seq: int) -> None:
            execution = self._execution(request.id, seq)
            execution.takes_input = exec_.stdin or exec_.tty is not None
            self._executions[request.id] = execution
            attached.extend((execution, execution.attach(each, places_of(request))) for each in callers)
            self._send_start(execution, exec_)

        callers = [caller]
        try:
            begun = await self._recorder.begin_exec(self.id, request.id, exec_, send=send)
        except asyncio.CancelledError:
            callers.clear()
            for execution, _ in attached:
                execution.detach(caller)
            raise
        if begun.fresh:
            return attached[0]
        return await self.attach(request, caller)

    async def attach(
        self, request: m.StartExec | m.AttachExec, caller: Caller
    ) -> tuple[Execution, tuple[Reader, Reader]]:
        await self._seen(request.id)
        execution = self._executions.get(request.id) or await self._from_log(request.id)
        return execution, execution.attach(caller, places_of(request))

    def running(self, id: str) -> Execution:
        """Raises `ExecNotFound` when no such command runs."""
        execution = self._executions.get(id)
        if execution is None:
            raise ExecNotFound(f"no running command {id}", field="id")
        return execution

    async def cancel(self, id: str) -> None:
        """End a command with all its processes; one that ended already is fine."""
        await self._seen(id)
        if id in self._executions:
            self._executions[id].cancel()
        elif self._recorder.exec_state(self.id, id) is None:
            raise ExecNotFound(f"no command {id}", field="id")

    async def _seen(self, id: str) -> None:
        """A command that was sent just before this call may still be on its way into the record."""
        if id not in self._executions and self._recorder.exec_state(self.id, id) is None:
            await self._recorder.settled(self.id)

    async def _from_log(self, id: str) -> Execution:
        state = self._recorder.exec_state(self.id, id)
        if state is None:
            raise ExecNotFound(f"no command {id}", field="id")
        if not state.ended:
            raise OutcomeUnknown(f"whether command {id} ran is not known")
        return Execution.from_log(self.id, state, await self._recorder.result_of(state), self._recorder)

    def _execution(self, id: str, seq: int) -> Execution:
        execution = Execution(self.id, id, seq, self._recorder, self._conclude)
        execution.before = self._unused or execution.before
        execution.result.add_done_callback(lambda _: self._executions.pop(id, None))
        return execution

    def _send_start(self, execution: Execution, exec_: Exec) -> None:
        channel = self._channel
        if channel is None:
            execution.fail(SandboxUnavailable("the guest is not connected", phase="link"))
            return
        self._starting[execution.id] = time.monotonic()
        execution.started.add_done_callback(lambda _: self._starting.pop(execution.id, None))
        execution.before, self._unused = self._unused or self._backend.usage(self.id), None
        with channel.together():
            channel.send(self._encoded(execution, exec_))
            execution.bind(channel)

    def _encoded(self, execution: Execution, exec_: Exec) -> bytes:
        if exec_.shell is not None:
            return guest.start(execution.seq, OpKind.RUN, b"", encode_run(exec_, self._shells.operation(exec_.shell)))
        if exec_.opens_shell:
            self._shells.opened(execution.id)
        user = exec_.user if exec_.user is not None else self._user
        cwd = exec_.cwd if exec_.cwd is not None else self._workdir
        execution.user, execution.cwd = user, cwd.decode(errors="replace")
        defaults = {b"PATH": PATH} if exec_.tty is None else {b"PATH": PATH, b"TERM": TERM}
        env = {**defaults, **self._env, **exec_.env, **exec_.secrets}
        body = encode_exec(exec_, cwd=cwd, env=env, files=self.spec.limits.files)
        return guest.start(execution.seq, OpKind.EXEC, user.encode(), body)

    async def _conclude(self, done: guest.Done, execution: Execution) -> ExecResult:
        end = outcome.ended(done, execution.user, execution.cwd)
        if isinstance(end.error, ShellEnded):
            end = end._replace(error=await self._shells.ended(execution.id))
        if execution.held and end.outcome == "cancelled":
            end = outcome.held(2 * START_SECONDS)
        limit = None
        if outcome.suspicious(end):
            used = self._backend.usage(self.id)
            limit = outcome.limit_of(
                end,
                oom=used.oom_kills > execution.before.oom_kills,
                pids=used.pids_hits > execution.before.pids_hits,
                disk=self._backend.disk_full(self.id),
            )
        totals = tuple(output.eof or (0, 0) for output in execution.outputs.values())
        result = outcome.result_of(ExecId(execution.id), done, end, limit, (totals[0], totals[1]))
        recorded = await self._recorder.end_exec(self.id, execution.id, result)
        if self.known is not None:
            await asyncio.shield(self.known)
            self.known = None
        return recorded

    async def give_up_all(self, error: BarchanError) -> None:
        """The sandbox is gone: record that the ends of its running commands are not known."""
        for state in self._recorder.running(self.id):
            await self._give_up(state.id, "unknown", error)

    async def _give_up(self, id: str, how: Outcome, error: BarchanError) -> None:
        await self._recorder.end_exec(self.id, id, ExecResult(id=ExecId(id), outcome=how, error=error.body()))
        execution = self._executions.get(id)
        if execution is not None:
            execution.fail(error)

    # --- files and processes

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """What runs inside, with the command each process came from; of very many the first."""
        collected = Collector(MOST_PROCESS_BYTES)
        operation = Operation(b"", collected)
        operation.on_caller(Frame(FrameType.CREDIT, STDOUT, 0, U64.pack(MOST_PROCESS_BYTES)))
        await self._operate(operation, "process.list", OpKind.PROCESSES, b"", b"", "root")
        names = self._recorder.names(self.id)
        cursor = guest.Cursor(bytes(collected.data))
        found: list[ProcessInfo] = []
        while cursor.left and len(found) < MOST_PROCESSES:
            found.append(_process_info(guest.read_process(cursor), names))
        return tuple(found)

    async def operate(self, request: m.OfFile, operation: Operation) -> bytes:
        """Run a file operation to its end. Returns the guest's detail."""
        kind, body = encode_file(request)
        user = request.user if request.user is not None else self._user
        operation.user = user
        return await self._operate(operation, request.op, kind, body, request.path, user)

    async def _operate(
        self, operation: Operation, verb: str, kind: OpKind, body: bytes, path: bytes, user: str
    ) -> bytes:
        channel = self._live_channel()

        def send(seq: int) -> None:
            operation.begin(channel, seq, guest.start(seq, kind, user.encode(), body))

        self._operations.add(operation)
        error = ""
        seq = 0
        try:
            seq = await self._recorder.begin_file(self.id, "", verb, path, user=user, send=send)
            return await operation.detail
        except BarchanError as failure:
            error = failure.code
            raise
        except asyncio.CancelledError:
            error = "cancelled"
            operation.cancel()
            raise
        finally:
            self._operations.discard(operation)
            if seq:
                await self._recorder.end_file(
                    self.id, seq, size=operation.size, digest=operation.digest if operation.size else b"", error=error
                )


def _process_info(process: guest.GuestProcess, names: dict[int, str]) -> ProcessInfo:
    """`names`: ids of commands by the guest's operation ids."""
    exec_id = names.get(process.op)
    return ProcessInfo(
        pid=process.pid,
        ppid=process.ppid,
        uid=process.uid,
        state=process.state,
        rss=process.rss,
        argv=beginning(process.argv, ARGV_SHOWN),
        exec_id=ExecId(exec_id) if exec_id is not None else None,
    )
