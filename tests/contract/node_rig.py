"""A node agent in the test's own process, and a caller that speaks to it over a real link."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from barchan.backends.base import Backend
from barchan.config import Layout, NodeConfig
from barchan.node.agent import Agent
from barchan.node.recorder import Recorder
from barchan.node.recovery import recover
from barchan.node.registry import Registry
from barchan.node.server import Server
from barchan.spec import EnvironmentRef, Exec, ExecResult, SandboxInfo, SandboxSpec
from barchan.wire import messages as m
from barchan.wire.frames import STDERR, STDIN, STDOUT, Frame, FrameType, decode_data, decode_eof, decode_u64
from barchan.wire.link import Call, Link

WINDOW = 1 << 20


class Running:
    """A command as its caller sees it: everything that came, and credit for more."""

    def __init__(self, caller: Caller, request: m.StartExec | m.AttachExec) -> None:
        self.out: dict[int, bytearray] = {STDOUT: bytearray(), STDERR: bytearray()}
        self.start = {STDOUT: request.stdout_offset, STDERR: request.stderr_offset}
        self.ends: dict[int, tuple[int, int]] = {}
        self.started: asyncio.Future[m.ExecStarted] = asyncio.get_running_loop().create_future()
        self.input_limit = 0
        self.call: Call = caller.link.call(m.pack_call(request), self._on_frame)
        for stream in self.out:
            self.call.credit(stream, self.start[stream] + WINDOW)

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            offset, data = decode_data(frame.payload)
            have = self.out[frame.stream]
            assert offset == self.start[frame.stream] + len(have), "a gap or a repetition"
            have += data
            self.call.credit(frame.stream, offset + len(data) + WINDOW)
        elif frame.type == FrameType.EOF:
            self.ends[frame.stream] = decode_eof(frame.payload)
        elif frame.type == FrameType.CREDIT:
            assert frame.stream == STDIN
            self.input_limit = decode_u64(frame.payload)
        elif not self.started.done():
            self.started.set_result(m.unpack(frame.payload, m.ExecStarted))

    async def result(self) -> ExecResult:
        answer = m.unpack(await self.call.answer, ExecResult)
        for stream, (total, dropped) in zip((STDOUT, STDERR), answer.outputs, strict=True):
            assert self.ends.setdefault(stream, (total, dropped)) == (total, dropped), "another end than the answer's"
            assert self.start[stream] + len(self.out[stream]) == total - dropped, "all output came before the answer"
        return answer

    @property
    def stdout(self) -> bytes:
        return bytes(self.out[STDOUT])


class Caller:
    """One client of the node."""

    def __init__(self, agent: Agent) -> None:
        loop = asyncio.get_running_loop()
        server = Server(agent)
        self.link = Link(lambda *parts: loop.call_soon(self._node.feed, b"".join(parts)) and None, dialled=True)
        self._node = Link(
            lambda *parts: loop.call_soon(self.link.feed, b"".join(parts)) and None, server.handle, dialled=False
        )

    async def create(self, key: str = "", **fields: object) -> SandboxInfo:
        spec = SandboxSpec(environment=EnvironmentRef(base="tiny"), **fields)  # type: ignore[arg-type]
        request = m.CreateSandbox(spec=spec, key=key or secrets.token_hex(8))
        return m.unpack(await self.link.call(m.pack_call(request)).answer, SandboxInfo)

    async def ask(self, request: m.Request) -> bytes:
        return await self.link.call(m.pack_call(request)).answer

    def start(self, sandbox: str, *argv: str, id: str = "", stdin: bool = False) -> Running:
        command = Exec(argv=tuple(word.encode() for word in argv), stdin=stdin)
        return Running(self, m.StartExec(sandbox=sandbox, id=id or secrets.token_hex(8), exec=command))

    def attach(self, sandbox: str, id: str, offset: int = 0) -> Running:
        return Running(self, m.AttachExec(sandbox=sandbox, id=id, stdout_offset=offset))

    async def run(self, sandbox: str, *argv: str) -> tuple[ExecResult, bytes]:
        running = self.start(sandbox, *argv)
        return await running.result(), running.stdout

    def hang_up(self) -> None:
        self._node.close()
        self.link.close()


def config_for(data: Path) -> NodeConfig:
    data.mkdir(mode=0o700, exist_ok=True)
    return NodeConfig(layout=Layout(data), name="n1", sweep_seconds=0.05)


@contextlib.asynccontextmanager
async def agent_on(config: NodeConfig, backend: Backend) -> AsyncIterator[Agent]:
    """An agent over `backend`; leaving it is the agent's death as far as sandboxes are concerned."""
    async with await Registry.open(config.layout) as registry:
        live = [row.id for row in registry.live()]
        async with await Recorder.open(config.layout, config, live=live) as recorder:
            agent = Agent(config, registry, recorder, {"container": backend})
            await recover(agent)
            try:
                yield agent
            finally:
                await agent.close()
