"""What ctrl-C and friends do while a command runs elsewhere.

The first signal is passed on to the command, the second cancels it, the third stops waiting for anybody. SIGTERM and
SIGHUP ask this program to end, so the command is cancelled too if it has not ended some seconds after the first one.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from barchan.errors import BarchanError

PATIENCE = 10.0
"""Seconds that the command gets after SIGTERM or SIGHUP."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Target(Protocol):
    """A running command."""

    async def signal(self, number: int) -> None: ...

    async def cancel(self) -> None: ...


class Interrupts:
    """Takes signals from the start of its block to the end. Belongs to the task that enters it."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._count = 0
        self._target: Target | None = None
        self._waiter: asyncio.Task[object] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._waiter = asyncio.current_task()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.take, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()

    def aim(self, target: Target) -> None:
        """Signals go to this command from now on. One that came before is passed on now."""
        self._target = target
        if self.first is not None:
            self._pass_on(self.first)

    def take(self, number: signal.Signals) -> None:
        self._count += 1
        self.first = self.first or number
        if self._target is None or self._count > 2:
            self._give_up()
        elif self._count == 1:
            self._pass_on(number)
        else:
            self.cancel()

    def cancel(self) -> None:
        """End the command, if there is one."""
        if self._target is not None:
            self._send(self._target.cancel())

    def _give_up(self) -> None:
        """Before there is a command, what is being made is waited for once, so that it can be ended properly."""
        if self._count > 1 and self._waiter is not None:
            self._waiter.cancel()

    def _pass_on(self, number: signal.Signals) -> None:
        assert self._target is not None
        self._send(self._target.signal(number))
        if number != signal.SIGINT:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self.cancel)

    def _send(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(_quietly(work))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """The command may have ended in between, and whoever waits for it learns of a lost connection."""
    with suppress(BarchanError):
        await work
