"""How many creates of batches each node works on at once.

A node makes several containers side by side; more than that only wait there. The number leaves room for slow ones: while
fewer than that hang on one node, they delay nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from barchan.spec import NodeName

EACH = 64
"""What a node's spawner takes before it lets requests wait."""


class Slots:
    """Of all nodes, shared by all batches. A single create takes none, so that it never waits behind a batch."""

    def __init__(self, each: int = EACH) -> None:
        self._each = each
        self._taken: Counter[NodeName] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    def free(self, name: NodeName) -> bool:
        return self._taken[name] < self._each

    async def change(self) -> None:
        """Until a slot may be free that was not."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    @contextlib.asynccontextmanager
    async def of(self, name: NodeName) -> AsyncIterator[None]:
        """Hold one of the node's. A create that must go to this node, because its key did, waits for nothing."""
        self._taken[name] += 1
        try:
            yield
        finally:
            self._taken[name] -= 1
            self._wake()

    def _wake(self) -> None:
        """The first of each line: which node it could use only it knows."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class Line:
    """Those of one batch that wait for a slot, first come, first served."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.turn = asyncio.Lock()
