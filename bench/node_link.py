"""A node agent of its own, spoken to at its own socket: what a node does without API and SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from barchan.config import Layout, NodeConfig
from barchan.errors import NodeUnavailable
from barchan.networks import NetworkRules
from barchan.spec import EnvironmentRef, Exec, Limits, NodeInfo, SandboxInfo, SandboxSpec
from barchan.wire import messages as m
from barchan.wire.frames import Frame
from barchan.wire.link import Incoming
from barchan.wire.transports import LinkProtocol
from bench.rig import DISK, GIB, SMALL, barchan, make_tiny

CREDIT = 1 << 20


@dataclass(frozen=True)
class Node:
    """A connected node agent."""

    pid: int
    work: Path
    rootfs: Path
    protocol: LinkProtocol

    async def ask(self, request: m.Request) -> bytes:
        return await self.protocol.link.call(m.pack_call(request)).answer

    async def create(self, limits: Limits = SMALL, network: NetworkRules | None = None) -> SandboxInfo:
        rules = network or NetworkRules()
        spec = SandboxSpec(environment=EnvironmentRef(base="tiny"), limits=limits, network=rules)
        return m.unpack(await self.ask(m.CreateSandbox(spec=spec, key=secrets.token_hex(16))), SandboxInfo)

    async def run(self, id: str, *argv: str) -> None:
        """Output is not looked at; it must fit the first credit."""
        command = Exec(argv=tuple(word.encode() for word in argv))
        request = m.StartExec(
            sandbox=id,
            id=secrets.token_hex(16),
            exec=command,
            stdout_limit=CREDIT,
            stderr_limit=CREDIT,
            quiet=True,
        )
        await self.protocol.link.call(m.pack_call(request), _ignore).answer

    async def stop(self, id: str) -> None:
        await self.ask(m.StopSandbox(sandbox=id))

    async def info(self) -> NodeInfo:
        return m.unpack(await self.ask(m.NodeStatus()), NodeInfo)


def _ignore(frame: Frame) -> None:
    pass


@contextlib.asynccontextmanager
async def node(**settings: Any) -> AsyncIterator[Node]:
    """Start one with these settings beside the defaults; stop it and remove everything at the end."""
    work = DISK / f"barchan-bench-{os.getpid()}-node"
    rootfs = make_tiny(work / "rootfs")
    data = work / "data"
    barchan(data, "env", "import", "tiny", str(rootfs))
    layout = Layout(data)
    layout.instance.write_text(secrets.token_hex(6))
    layout.run.mkdir(mode=0o700, exist_ok=True)
    config = msgspec.json.encode(
        NodeConfig(layout=layout, name="bench", scratch_bytes=4 * GIB, **settings), enc_hook=str
    )
    try:
        async with _listening(layout.node_socket) as greeted:
            process = await _start(config)
            try:
                yield Node(process.pid, work, rootfs, await asyncio.wait_for(greeted, 120))
            finally:
                process.send_signal(signal.SIGTERM)
                await process.wait()
    finally:
        await (await _start(config, "--purge")).wait()
        shutil.rmtree(work, ignore_errors=True)


async def _start(config: bytes, *options: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "barchan.node.main",
        *options,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(config)
    process.stdin.close()
    return process


@contextlib.asynccontextmanager
async def _listening(path: Path) -> AsyncIterator[asyncio.Future[LinkProtocol]]:
    """In the API's place: answers the node's greeting and leaves the rest to the caller."""
    greeted: asyncio.Future[LinkProtocol] = asyncio.get_running_loop().create_future()
    links: list[LinkProtocol] = []

    async def hear(call: Incoming) -> bytes:
        if not greeted.done():
            greeted.set_result(links[-1])
        return m.pack(None)

    def accept() -> LinkProtocol:
        links.append(LinkProtocol(hear, dialled=False, lost=lambda: NodeUnavailable("the node hung up")))
        return links[-1]

    server = await asyncio.get_running_loop().create_unix_server(accept, str(path))
    async with server:
        yield greeted
