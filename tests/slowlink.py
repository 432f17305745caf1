"""A slow network on loopback: TCP through a process that delays, limits and counts bytes, and can be cut.

`slow_link` runs it. As a program it takes a `Setting` on one line of standard input, answers with the ports that it listens at,
and then answers one command a line: `counts`, `cut`, `restore`. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

_PIECE = 256 << 10
_UNDER_WAY = 8 << 20
"""Bytes of one direction of a connection that are under way at most: no bandwidth is lost to the latency below 1 s."""
_TICK = 0.001


@dataclass(frozen=True)
class Setting:
    targets: list[int]
    """Ports on loopback."""
    delay: float
    """Seconds, in each direction."""
    rate: float
    """Bytes a second over all connections and both directions; 0 for no limit."""


@dataclass
class Counts:
    """Of one target, since the start."""

    down: int = 0
    """Bytes from the target."""
    up: int = 0
    connections: int = 0


class SlowLink:
    """`ports[target]` leads to `target`."""

    def __init__(self, process: subprocess.Popen[bytes], setting: Setting) -> None:
        self._process, self._lock = process, threading.Lock()
        self.ports = dict(zip(setting.targets, self._ask(json.dumps(asdict(setting))), strict=True))

    def counts(self, target: int) -> Counts:
        return Counts(**self._ask("counts")[str(target)])

    def cut(self) -> None:
        """Connections are reset, new ones refused."""
        self._ask("cut")

    def restore(self) -> None:
        self._ask("restore")

    def _ask(self, line: str) -> Any:
        assert self._process.stdin and self._process.stdout, "they are pipes"
        with self._lock:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@contextmanager
def slow_link(targets: Sequence[int], *, delay: float = 0.0, rate: float = 0.0) -> Iterator[SlowLink]:
    command = [sys.executable, "-m", "tests.slowlink"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield SlowLink(process, Setting(list(targets), delay, rate))
        finally:
            process.kill()


# --- the process


@dataclass
class _Line:
    """What all connections share."""

    delay: float
    rate: float
    busy_until: float = 0.0

    async def carry(self, size: int, came: float) -> None:
        """Until that many bytes, which came at `came`, are through."""
        loop = asyncio.get_running_loop()
        due = came + self.delay
        if self.rate:
            self.busy_until = max(self.busy_until, loop.time()) + size / self.rate
            due = max(due, self.busy_until)
        if (left := due - loop.time()) > (_TICK if self.rate and not self.delay else 0):
            await asyncio.sleep(left)


@dataclass
class _Door:
    """One target."""

    target: int
    line: _Line
    port: int = 0
    counts: Counts = field(default_factory=Counts)
    server: asyncio.Server | None = None
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=_PIECE)
        self.port = self.server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        if self.server is not None:
            self.server.close()
        for writer in self.open:
            writer.transport.abort()

    async def _serve(self, near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        self.open.add(client)
        try:
            await asyncio.sleep(2 * self.line.delay)  # what opening a connection takes
            far, target = await asyncio.open_connection("127.0.0.1", self.target, limit=_PIECE)
            self.open.add(target)
            try:
                await asyncio.gather(self._carry(near, target, "up"), self._carry(far, client, "down"))
            finally:
                self.open.discard(target)
                target.transport.abort()
        except OSError:
            pass
        finally:
            self.open.discard(client)
            client.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str) -> None:
        """Reading and writing at the same time: what is under way does not hold up what comes behind it."""
        under_way: deque[tuple[float, bytes]] = deque()
        changed, size = asyncio.Condition(), 0

        async def read() -> None:
            nonlocal size
            while True:
                piece = await source.read(_PIECE)
                async with changed:
                    under_way.append((asyncio.get_running_loop().time(), piece))
                    size += len(piece)
                    changed.notify_all()
                    if not piece:
                        return
                    await changed.wait_for(lambda: size < _UNDER_WAY)  # noqa: B023

        async def write() -> None:
            nonlocal size
            while True:
                async with changed:
                    await changed.wait_for(lambda: under_way)
                    came, piece = under_way.popleft()
                    size -= len(piece)
                    changed.notify_all()
                await self.line.carry(len(piece), came)
                if not piece:
                    with suppress(OSError):
                        sink.write_eof()
                    return
                setattr(self.counts, way, getattr(self.counts, way) + len(piece))
                sink.write(piece)
                await sink.drain()

        await asyncio.gather(read(), write())


async def _main() -> None:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    setting = Setting(**json.loads(await commands.readline()))
    line = _Line(setting.delay, setting.rate)
    doors = [_Door(target, line) for target in setting.targets]
    for door in doors:
        await door.listen()
    _answer([door.port for door in doors])
    while command := (await commands.readline()).strip():
        if command == b"cut":
            for door in doors:
                door.cut()
        elif command == b"restore":
            for door in doors:
                await door.listen()
        _answer({door.target: asdict(door.counts) for door in doors})


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
