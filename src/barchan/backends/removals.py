"""What has ended is removed after its stop was answered: soon, not in silence, and only so much of it waits.

The processes are dead by then; cgroups, writable tree, socket and id range are left. An agent that dies loses none of it:
the next one finds what belongs to no sandbox and sweeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from barchan.errors import BarchanError

logger = logging.getLogger(__name__)

MOST = 64
"""Waiting; beyond that a stop waits for its own removal."""
AT_ONCE = 16
GATHER_SECONDS = 0.05
"""Fewer wait so long for others, so that many go in one message."""
RETRY_SECONDS = 1.0


class Removals:
    """Belongs to the event loop. `first` removes what can be removed at once and returns the rest; that is `sweep`'s,
    which blocks. Both may be called again for the same name. `after` follows each group that was removed."""

    def __init__(
        self,
        first: Callable[[list[str]], Awaitable[list[str]]],
        sweep: Callable[[str], None],
        threads: Executor,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._first = first
        self._after = after
        self._sweep = sweep
        self._threads = threads
        self._waiting: list[str] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.pending: set[str] = set()

    async def add(self, name: str) -> None:
        """Returns at once while few wait."""
        self.pending.add(name)
        self._waiting.append(name)
        if len(self._waiting) >= AT_ONCE:
            self._hurry.set()
        self._start()
        if len(self.pending) > MOST:
            await self.drain()

    async def drain(self) -> None:
        """Until everything was tried that waits now."""
        self._hurry.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Try all once more. What cannot be removed is named in the log and left for the next agent's sweep."""
        self._waiting = sorted(self.pending)
        self._start()
        await self.drain()

    def _start(self) -> None:
        if self._idle.is_set() and self._waiting:
            self._idle.clear()
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if len(self._waiting) < AT_ONCE:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), GATHER_SECONDS)
            names, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            left = await self._first(names)
            failed = await loop.run_in_executor(self._threads, self._sweep_all, left) if left else {}
            self.pending.difference_update(name for name in names if name not in failed)
            if failed:
                loop.call_later(RETRY_SECONDS, self._again, list(failed))
            if self._after is not None:
                await self._after()
        self._hurry.clear()
        self._idle.set()

    def _sweep_all(self, names: list[str]) -> dict[str, Exception]:
        failed: dict[str, Exception] = {}
        for name in names:
            try:
                self._sweep(name)
            except (BarchanError, OSError) as error:
                logger.error("cannot remove %s yet: %s", name, error)
                failed[name] = error
        return failed

    def _again(self, names: list[str]) -> None:
        self._waiting += [name for name in names if name in self.pending]
        self._start()
