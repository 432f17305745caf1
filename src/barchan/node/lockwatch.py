"""File locks are charged to no sandbox's memory: watch what they take, and end who takes much."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from barchan.backends.base import Populated
from barchan.kernel.filelocks import LockMeter, held
from barchan.node.agent import Agent
from barchan.spec import MIB

logger = logging.getLogger(__name__)

ALLOWED = 32 * MIB
"""What locks may take, or grow by after a search found nobody, before they are searched for."""
FEW = 20_000
"""Locks that one sandbox may hold in any case: some 4 MB."""
PERIOD = 0.25
"""Seconds. One processor takes locks for some 15 MiB in that time."""


class Alarm:
    """When to search: pure."""

    def __init__(self, allowed: int = ALLOWED) -> None:
        self._allowed = allowed
        self._least = 0

    def rings(self, size: int) -> bool:
        self._least = min(self._least, size)
        return size > self._least + self._allowed

    def found_nobody(self, size: int) -> None:
        """What is there now is to be put up with."""
        self._least = size


def guilty(counts: Mapping[str, int]) -> list[str]:
    """Sandboxes that hold more than a few. By number of locks."""
    return [id for id, count in counts.items() if count > FEW]


async def watch(agent: Agent) -> None:
    """For ever, unless the kernel does not say what locks take."""
    try:
        meter = LockMeter()
    except OSError as error:
        logger.warning("file locks are not watched: %s", error)
        return await asyncio.Event().wait()  # type: ignore[return-value]
    with contextlib.closing(meter):
        alarm = Alarm()
        while True:
            await asyncio.sleep(PERIOD)
            size = meter.size()
            if alarm.rings(size) and not await end_holders(agent):
                logger.warning("file locks take %d MiB of the host's memory; no sandbox shows many", size // MIB)
                alarm.found_nobody(size)


async def end_holders(agent: Agent) -> list[str]:
    """End the sandboxes that hold many; their ids. Returns when nothing of them is left."""
    counts = await asyncio.to_thread(_count, _backends(agent))
    found = guilty(counts)
    for id in found:
        agent.broken(
            id, f"out of memory (oom): its programs hold more than {FEW} file locks, which its limit cannot count"
        )
    await asyncio.gather(*(agent.stop(id) for id in found))
    return found


def _backends(agent: Agent) -> dict[str, Populated]:
    backends = ((id, agent.backend(sandbox.spec.backend)) for id, sandbox in agent.sandboxes.items())
    return {id: backend for id, backend in backends if isinstance(backend, Populated)}


def _count(backends: Mapping[str, Populated]) -> dict[str, int]:
    counts = {}
    for id, backend in backends.items():
        with contextlib.suppress(OSError):  # it is ending
            counts[id] = held(backend.pids(id), FEW)
    return counts
