"""Sandboxes and parts of them made ahead of their requests.

Two kinds are held. A *ready* one is complete: its guest runs, and whoever asks for the same shape (environment, limits,
flags; see `Order`) gets it as it is. A *parked* one is a child in its namespaces and groups that waits for its files and
fits any shape. `demand` decides how many of each; `room` bounds them by the host's memory. What is held is named by a
place of its own, not by a sandbox's id; the registry learns the place when a sandbox takes it, so what an agent leaves
behind in a pool belongs to nobody and the next one sweeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from barchan.backends.container_steps import Draft, Order
from barchan.backends.demand import Demand, Plan
from barchan.errors import BarchanError
from barchan.pools import PoolInfo
from barchan.spec import Limits

logger = logging.getLogger(__name__)

REFILLS = 2
"""Made ahead at once."""
TRIM_SECONDS = 5.0
QUIET_SECONDS = 0.05
"""Since the last request: a pool that is at least half full is filled then, not beside the request."""
PLAN_SECONDS = 0.1
PAUSE_SECONDS = 5.0
"""Without refills after one that failed."""


class Maker(Protocol):
    """Errors of both: `BarchanError`, `OSError`; then nothing is left behind."""

    async def park(self, limits: Limits) -> Draft: ...

    async def furnish(self, order: Order) -> Draft: ...

    async def discard(self, draft: Draft) -> None: ...


class Pool:
    """Belongs to the event loop. `room`: how many may be held at this moment."""

    def __init__(self, maker: Maker, most: int, room: Callable[[], int], clock: Callable[[], float] = time.monotonic):
        self._maker = maker
        self._room = room
        self._clock = clock
        self._demand = Demand(most)
        self._ready: dict[bytes, deque[Draft]] = {}
        self._parked: deque[Draft] = deque()
        self._orders: dict[bytes, Order] = {}
        self._limits = Limits()
        self._making: dict[bytes | None, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._paused_until = self._taken = 0.0
        self._quiet: asyncio.TimerHandle | None = None
        self._plan: Plan | None = None
        self._plan_until = 0.0
        self._closed = most <= 0
        self.hits = self.parked_hits = self.misses = self.refills = self.discarded = 0
        self.refill_seconds = 0.0

    def take_ready(self, order: Order) -> Draft | None:
        """A ready one if there is one: the caller's from here on."""
        return self.take(order) if self._ready.get(order.shape) else None

    def take(self, order: Order) -> Draft | None:
        """One that fits, ready or parked: the caller's from here on."""
        if self._closed:
            self.misses += 1
            return None
        ready = self._ready.get(order.shape)
        draft = ready.popleft() if ready else self._parked.popleft() if self._parked else None
        if draft is None:
            self.misses += 1
        elif draft.order is not None:
            self.hits += 1
        else:
            self.parked_hits += 1
        self._taken = self._clock()
        self._plan = None
        self._demand.note(order.shape, self._taken, ready=bool(draft and draft.order))
        self._orders[order.shape], self._limits = order, order.spec.limits
        if draft is not None:
            self._unwatch(draft)
        self._refill()
        return draft

    def info(self) -> PoolInfo:
        return PoolInfo(
            ready=sum(map(len, self._ready.values())),
            parked=len(self._parked),
            hits=self.hits,
            parked_hits=self.parked_hits,
            misses=self.misses,
            refills=self.refills,
            refill_ms=round(self.refill_seconds * 1000 / self.refills, 3) if self.refills else 0.0,
            discarded=self.discarded,
        )

    async def close(self) -> None:
        """Remove all that is held. Idempotent."""
        self._closed = True
        for timer in (self._timer, self._quiet):
            if timer is not None:
                timer.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        held = list(self._held())
        self._ready.clear()
        self._parked.clear()
        for draft in held:
            self._unwatch(draft)
            await self._discard(draft)

    # --- filling

    def _refill(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)
        while len(self._tasks) < REFILLS and not self._closed and (wanted := self._next()) is not None:
            shape = wanted[0]
            self._making[shape] = self._making.get(shape, 0) + 1
            order = self._orders[shape] if shape is not None else None
            task = asyncio.get_running_loop().create_task(self._make(shape, order))
            self._tasks.add(task)
            task.add_done_callback(self._made)

    def _next(self) -> tuple[bytes | None] | None:
        """The shape to make next, None of it for a parked child; None when there are enough for now."""
        now = self._clock()
        if now < self._paused_until:
            return None
        plan, short = self._planned(now), False
        wanted: list[tuple[bytes | None, int]] = [*plan.ready.items(), (None, plan.parked)]
        for shape, n in wanted:
            held = self._count(shape)
            if held >= n or (shape is not None and shape not in self._orders):
                continue
            if now >= self._taken + QUIET_SECONDS or held < n / 2:
                return (shape,)
            short = True
        if short:
            self._wait_for_quiet()
        return None

    def _planned(self, now: float) -> Plan:
        if self._plan is None or now >= self._plan_until:
            self._plan, self._plan_until = self._demand.plan(self._room(), now), now + PLAN_SECONDS
        return self._plan

    def _count(self, shape: bytes | None) -> int:
        held = self._parked if shape is None else self._ready.get(shape, ())
        return len(held) + self._making.get(shape, 0)

    def _wait_for_quiet(self) -> None:
        if self._quiet is None:
            self._quiet = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._now_quiet)

    def _now_quiet(self) -> None:
        self._quiet = None
        self._refill()

    async def _make(self, shape: bytes | None, order: Order | None) -> None:
        began = self._clock()
        try:
            draft = await (self._maker.park(self._limits) if order is None else self._maker.furnish(order))
        except (BarchanError, OSError) as error:
            logger.warning("nothing is made ahead for %g s: %s", PAUSE_SECONDS, error)
            self._paused_until = self._clock() + PAUSE_SECONDS
            return
        finally:
            self._making[shape] -= 1
        self.refills += 1
        self.refill_seconds += self._clock() - began
        if shape is None:
            self._parked.append(draft)
        else:
            self._ready.setdefault(shape, deque()).append(draft)
        asyncio.get_running_loop().add_reader(draft.pidfd, self._died, draft)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("making ahead failed", exc_info=error)
            self._paused_until = self._clock() + PAUSE_SECONDS
        self._refill()

    # --- emptying

    def _trim(self) -> None:
        """Give back what is not expected to be asked for any more."""
        self._timer = None
        plan = self._demand.plan(self._room(), self._clock())
        surplus = [(self._parked, plan.parked)]
        surplus += [(held, plan.ready.get(shape, 0)) for shape, held in self._ready.items()]
        for held, wanted in surplus:
            while len(held) > wanted:
                self._drop(held.popleft())
        self._ready = {shape: held for shape, held in self._ready.items() if held}
        self._orders = {shape: order for shape, order in self._orders.items() if shape in plan.ready}
        if self._ready or self._parked or self._tasks:
            self._refill()

    def _died(self, draft: Draft) -> None:
        """It ended while nobody had it."""
        for held in (self._parked, *self._ready.values()):
            with contextlib.suppress(ValueError):
                held.remove(draft)
        self._drop(draft)

    def _drop(self, draft: Draft) -> None:
        self._unwatch(draft)
        self.discarded += 1
        task = asyncio.get_running_loop().create_task(self._discard(draft))
        self._tasks.add(task)
        task.add_done_callback(self._made)

    async def _discard(self, draft: Draft) -> None:
        try:
            await self._maker.discard(draft)
        except (BarchanError, OSError) as error:
            logger.error("cannot remove %s: %s", draft.name, error)

    def _unwatch(self, draft: Draft) -> None:
        asyncio.get_running_loop().remove_reader(draft.pidfd)

    def _held(self) -> list[Draft]:
        return [*self._parked, *(draft for held in self._ready.values() for draft in held)]
