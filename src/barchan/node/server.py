"""The node's end of its link to the API: dial, greet, answer calls.

The node dials, so that it can stand behind a network boundary; it dials again for ever when the API goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from barchan.errors import ApiUnavailable, BarchanError, InvalidRequest, ProtocolError, from_body
from barchan.node.agent import Agent
from barchan.node.ends import Reader, places_of
from barchan.node.execution import Execution
from barchan.node.operation import Operation
from barchan.node.past import gone
from barchan.spec import ExecId, ExecResult, ProcessInfo, check_terminal
from barchan.wire import guest
from barchan.wire import messages as m
from barchan.wire.frames import HEAD, STDIN, Frame, FrameType, decode_data, decode_eof, decode_u64
from barchan.wire.link import Incoming
from barchan.wire.transports import LinkProtocol

logger = logging.getLogger(__name__)
REDIAL_SECONDS = 0.2
MOST_INPUT = 4 * guest.INPUT_WINDOW
"""Bytes of input that may wait to be recorded: a caller that keeps to its credit has a quarter of it under way."""


class ExecCall:
    """One caller of a command: hands its frames to the execution."""

    def __init__(self, agent: Agent, call: Incoming) -> None:
        self._agent = agent
        self._call = call
        self._execution: Execution | None = None
        self._readers: dict[int, Reader] = {}
        self._inputs: asyncio.Queue[Frame] | None = None
        self._input_bytes = 0
        self._feeding: asyncio.Task[None] | None = None

    async def serve(self, execution: Execution, readers: tuple[Reader, Reader], *, quiet: bool = False) -> bytes:
        self._execution = execution
        self._readers = {reader.stream: reader for reader in readers}
        self._call.on_frame = self._on_frame
        try:
            if not quiet:
                await self._tell_start(execution)
            result = await asyncio.shield(execution.result)
            if result.error is not None or not all(map(execution.has_all, readers)):
                execution.tell_ends()
                for reader in readers:
                    await reader.end_told()
            return m.pack(_raised(result))
        finally:
            if self._feeding is not None:
                self._feeding.cancel()
            execution.detach(self._call)

    async def _tell_start(self, execution: Execution) -> None:
        pid = await asyncio.shield(execution.started)
        if pid or _ran(execution):  # otherwise its result says why it did not
            self._call.event(m.ExecStarted(id=execution.id, pid=pid, stdin_offset=execution.input.recorded))

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == FrameType.CREDIT and frame.stream in self._readers and self._execution is not None:
            self._execution.take_credit(self._readers[frame.stream], decode_u64(frame.payload))
        elif frame.type in (FrameType.DATA, FrameType.EOF) and frame.stream == STDIN:
            self._input_bytes += len(frame.payload) + HEAD.size
            if self._input_bytes > MOST_INPUT:
                raise ProtocolError("input without credit")
            if self._inputs is None:
                self._inputs = asyncio.Queue()
            self._inputs.put_nowait(frame)
            if self._feeding is None and self._execution is not None:
                self._feeding = self._agent.spawn(self._feed(self._execution, self._inputs))

    async def _feed(self, execution: Execution, inputs: asyncio.Queue[Frame]) -> None:
        """Input in its order; what cannot be recorded fails the command for its callers."""
        while True:
            frame = await inputs.get()
            self._input_bytes -= len(frame.payload) + HEAD.size
            try:
                if frame.type == FrameType.DATA:
                    await execution.take_input(*decode_data(frame.payload))
                else:
                    await execution.end_input(decode_eof(frame.payload)[0])
            except BarchanError as error:
                execution.fail(error)
                return


def _ran(execution: Execution) -> bool:
    """Of one that ended before this caller came: its output waits for the caller to take it."""
    return execution.result.done() and execution.result.exception() is None and execution.result.result().error is None


def _raised(result: ExecResult) -> ExecResult:
    if result.error is not None:
        raise from_body(result.error)
    return result


class Server:
    """Answers the calls of one API process."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._verbs: dict[type[m.Request], Callable[[Any, Incoming], Awaitable[Any]]] = {
            m.NodeStatus: self._status,
            m.ListEnvironments: self._environments,
            m.LockEnvironment: lambda r, c: self._agent.lock(r.environment),
            m.PullImage: lambda r, c: self._agent.pull(r, c.event),
            m.CreateSandbox: self._create,
            m.ListSandboxes: self._list,
            m.GetSandbox: self._get,
            m.AbandonCreate: self._abandon,
            m.StopSandbox: self._stop,
            m.GetStats: self._stats,
            m.PackDiff: lambda r, c: self._agent.packing.pack(r, c),
            m.RenewSandbox: lambda r, c: self._agent.renew(r),
            m.SignalExec: self._signal,
            m.ResizeExec: self._resize,
            m.CancelExec: self._cancel,
            m.ListExecs: self._execs,
            m.ListProcesses: self._processes,
            m.StatFile: self._stat,
        }

    async def handle(self, call: Incoming) -> bytes:
        request = m.unpack_call(call.payload)
        if isinstance(request, m.StartExec):
            sandbox = self._agent.live(request.sandbox)
            return await ExecCall(self._agent, call).serve(*await sandbox.start(request, call), quiet=request.quiet)
        if isinstance(request, m.AttachExec):
            return await self._attach(request, call)
        verb = self._verbs.get(type(request))
        if verb is not None:
            return m.pack(await verb(request, call))
        if isinstance(request, m.OfFile):
            await self._operate(request, call)
            return m.pack(None)
        raise InvalidRequest(f"{request.op} is not for a node", field="op")

    async def _attach(self, request: m.AttachExec, call: Incoming) -> bytes:
        return await ExecCall(self._agent, call).serve(*await self._taken_up(request, call))

    async def _taken_up(self, request: m.AttachExec, call: Incoming) -> tuple[Execution, tuple[Reader, Reader]]:
        if not self._agent.row(request.sandbox).ended:
            return await self._agent.live(request.sandbox).attach(request, call)
        execution = await self._agent.ended_exec(request.sandbox, request.id)
        return execution, execution.attach(call, places_of(request))

    async def _status(self, request: m.NodeStatus, call: Incoming) -> Any:
        return self._agent.node_info()

    async def _environments(self, request: m.ListEnvironments, call: Incoming) -> Any:
        return await self._agent.environments()

    async def _create(self, request: m.CreateSandbox, call: Incoming) -> Any:
        try:
            return await self._agent.create(request, call.event)
        except asyncio.CancelledError:
            if not call.link_lost:
                self._agent.spawn(self._agent.abandon(request.key))
            raise

    async def _abandon(self, request: m.AbandonCreate, call: Incoming) -> None:
        await self._agent.abandon(request.key)

    async def _stats(self, request: m.GetStats, call: Incoming) -> Any:
        return await self._agent.stats(request.sandbox)

    async def _list(self, request: m.ListSandboxes, call: Incoming) -> Any:
        return self._agent.list(request)

    async def _get(self, request: m.GetSandbox, call: Incoming) -> Any:
        return self._agent.get(request.sandbox)

    async def _stop(self, request: m.StopSandbox, call: Incoming) -> Any:
        return await self._agent.stop(request.sandbox)

    async def _signal(self, request: m.SignalExec, call: Incoming) -> None:
        if not 1 <= request.signal <= 64:
            raise InvalidRequest(f"signal: {request.signal} is no signal", field="signal")
        execution = self._agent.live(request.sandbox).running(ExecId(request.id))
        await execution.signal(request.signal, request.everyone)

    async def _cancel(self, request: m.CancelExec, call: Incoming) -> None:
        await self._agent.live(request.sandbox).cancel(request.id)

    async def _resize(self, request: m.ResizeExec, call: Incoming) -> None:
        size = check_terminal(request.size)
        await self._agent.live(request.sandbox).running(ExecId(request.id)).resize(size)

    async def _execs(self, request: m.ListExecs, call: Incoming) -> Any:
        known = await self._agent.commands(request.sandbox)
        if not known.whole and not request.partial:
            raise gone(request.sandbox, "all commands")
        return await self._agent.recorder.infos(known.execs, request.after, request.limit)

    async def _stat(self, request: m.StatFile, call: Incoming) -> Any:
        entry = guest.read_entry(guest.Cursor(await self._operate(request, call)))
        return guest.stat_of(entry, request.path)

    async def _processes(self, request: m.ListProcesses, call: Incoming) -> tuple[ProcessInfo, ...]:
        return await self._agent.live(request.sandbox).processes()

    async def _operate(self, request: m.OfFile, call: Incoming) -> bytes:
        operation = Operation(request.path, call)
        call.on_frame = operation.on_caller
        return await self._agent.live(request.sandbox).operate(request, operation)


async def keep_linked(agent: Agent, socket: Path, greeted: Callable[[], None]) -> None:
    """Dial the API for ever. `greeted` is called each time it took the node."""
    server = Server(agent)
    while True:
        with contextlib.suppress(OSError, BarchanError):
            await _link_once(server, agent, socket, greeted)
        await asyncio.sleep(REDIAL_SECONDS)


async def _link_once(server: Server, agent: Agent, socket: Path, greeted: Callable[[], None]) -> None:
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_unix_connection(
        lambda: LinkProtocol(server.handle, dialled=True, lost=_api_lost, on_close=lambda _: gone.set()), str(socket)
    )
    try:
        await protocol.link.call(m.pack_call(agent.hello())).answer
        greeted()
        await _report(agent, protocol, gone)
    finally:
        protocol.close()


async def _report(agent: Agent, protocol: LinkProtocol, gone: asyncio.Event) -> None:
    """Say again and again how full this node is: placement only counts what it adds, not what ended since."""
    while not gone.is_set():
        try:
            await asyncio.wait_for(gone.wait(), agent.config.sweep_seconds)
        except TimeoutError:
            await protocol.link.call(m.pack_call(m.Hello(info=agent.node_info()))).answer


def _api_lost() -> BarchanError:
    return ApiUnavailable("the API hung up")
