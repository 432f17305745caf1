"""What tests of the client need that is not the same without `async`: `tests/rig_sync.py` has the same names for threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from barchan import Client
from barchan.wire.link import Incoming
from tests.contract.fake_node import FakeNode
from tests.contract.faults import Fault

T = TypeVar("T")
Cancelled = asyncio.CancelledError
Event = asyncio.Event
within = asyncio.timeout


def fail(node: FakeNode, operation: str, fault: Fault, *, times: int = 1 << 30) -> None:
    """Let the next `times` requests of the operation (`file_stat`) meet the fault."""
    real, left = getattr(node, f"_{operation}"), times

    async def handler(call: Incoming, request: Any) -> Any:
        nonlocal left
        left -= 1
        return await (fault(node, call) if left >= 0 else real(call, request))

    setattr(node, f"_{operation}", handler)


def beside(work: Callable[..., Coroutine[Any, Any, T]], *args: Any, **options: Any) -> asyncio.Task[T]:
    """Call it beside the test: `await` the result, or `cancel()` it."""
    return asyncio.get_running_loop().create_task(work(*args, **options))


async def together(*works: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Their results, in their order."""
    return list(await asyncio.gather(*(work() for work in works)))


async def aside(work: Callable[..., T], *args: Any) -> T:
    """Call what blocks, while what is under way goes on."""
    return await asyncio.to_thread(work, *args)


async def pause() -> None:
    """Let others go on, other processes too: what is waited for may need the processor that a loop of this would take."""
    await asyncio.sleep(0.005)


async def settle() -> None:
    """Let API and node do what they can without the client."""
    for _ in range(200):
        await asyncio.sleep(0)


async def finished(node: FakeNode, sandbox: str, id_: str) -> Any:
    """The result of a command, once the node has one."""
    command = node.commands[sandbox][id_]
    await command.done.wait()
    return command.result


def cut(client: Client) -> None:
    """Lose the connection, as to a network that goes away or a proxy that was restarted."""
    assert client._connection._socket is not None
    client._connection._socket.abort()


def deny_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may do anything, so that the kernel's answer to others is given for it."""

    async def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", denied)


@contextlib.asynccontextmanager
async def hanging_up() -> AsyncIterator[int]:
    """The port of a server that closes every connection when it was written to."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
