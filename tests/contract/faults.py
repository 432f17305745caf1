"""How the scripted node may treat a request instead of answering it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from barchan.errors import SandboxUnavailable
from barchan.wire.link import Incoming
from tests.contract.fake_node import FakeNode

Fault = Callable[[FakeNode, Incoming], Awaitable[None]]


async def is_full(node: FakeNode, call: Incoming) -> None:
    """The node ends the outputs of a command that it cannot start before it says why."""
    call.send_eof(1, 0)
    call.send_eof(2, 0)
    await asyncio.sleep(0)
    raise SandboxUnavailable("no process is left")


async def loses_the_link(node: FakeNode, call: Incoming) -> None:
    node.blink()
    await asyncio.Event().wait()


async def never_ends(node: FakeNode, call: Incoming) -> None:
    await node._reply_bytes(call, bytes(70 << 20))


async def answers_early(node: FakeNode, call: Incoming) -> None:
    return None
