"""The commands of sandboxes that have ended: found in the log when somebody asks, since nothing of them is in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from barchan.errors import RecordGone
from barchan.trajectory.index import Rebuilt, rebuild
from barchan.trajectory.log import Log

KEPT_COMMANDS = 20_000
"""Of sandboxes asked for last, about 0.5 KB each; more only if the last one had more."""
KEPT_SECONDS = 60.0


class Past:
    """Belongs to the event loop. One search of the log at a time, in a thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: OrderedDict[str, Rebuilt] = OrderedDict()
        self._searching = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def of(self, sandbox: str, since: float) -> Rebuilt:
        """What the log holds of a sandbox that ended and was made at `since` (Unix seconds), or a little earlier."""
        async with self._searching:
            found = self._kept.pop(sandbox, None)
            if found is None or not all(map(self._log.keeps, found.segments)):
                found = await asyncio.to_thread(lambda: rebuild(sandbox, self._log.scan_of(sandbox, since)))
            self._keep(sandbox, found)
            return found

    def _keep(self, sandbox: str, found: Rebuilt) -> None:
        self._kept[sandbox] = found
        count = sum(len(one.execs) for one in self._kept.values())
        while count > KEPT_COMMANDS and len(self._kept) > 1:
            count -= len(self._kept.popitem(last=False)[1].execs)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._kept.clear)


def gone(sandbox: str, what: str) -> RecordGone:
    return RecordGone(
        f"the log does not hold {what} of sandbox {sandbox} any more",
        hint="older records are removed when it has reached its size, see log_bytes",
    )
