"""One thread that carries out jobs in the order of their submission, and as many at once as have piled up.

The event loop never blocks on a disk, and whatever waits shares one sync (group commit): while a group is written, the
next one gathers.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from barchan.errors import InternalError
from barchan.spec import MIB

GROUP_JOBS, GROUP_BYTES = 1024, 4 * MIB
"""What one group takes at most."""
JOIN_SECONDS = 0.02
QUEUE_BYTES = 64 * MIB
"""From here on `room` waits."""


class Job:
    """What to do and what came out. `run` is for the committing function; exactly one of value and error counts."""

    __slots__ = ("acknowledged", "done", "durable", "error", "future", "ordered", "run", "size", "value")

    def __init__(
        self,
        run: Callable[[], Any],
        *,
        size: int = 256,
        durable: bool = False,
        ordered: str = "",
        done: Callable[[Any], None] | None = None,
    ) -> None:
        self.run = run
        self.size = size
        self.durable = durable
        self.ordered = ordered
        """Jobs with the same non-empty name are acknowledged in the order of their submission."""
        self.done = done
        """Called in the loop with the value, in order, before whoever awaits the future goes on."""
        self.acknowledged = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.future: asyncio.Future[Any]

    def settle(self) -> None:
        """Tell whoever waits. In the loop."""
        error = self.error
        if error is None and self.done:
            try:
                self.done(self.value)
            except Exception as failure:  # noqa: BLE001 - belongs to the caller that gave the function
                error = failure
        if error is None:
            _resolve(self.future, self.value)
        elif not self.future.done():
            self.future.set_exception(error)


Acknowledge = Callable[[Sequence[Job], Any], None]
"""Settle these jobs in the loop, after handing the second value to `published`."""


class Writer:
    """`commit(jobs, acknowledge)` runs in the thread and must acknowledge every job, or raise, which fails those left."""

    def __init__(
        self, name: str, commit: Callable[[list[Job], Acknowledge], None], published: Callable[[Any], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._commit = commit
        self._published = published
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pending = 0
        self._early = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._joining: list[Job] = []
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Bytes submitted and not settled."""
        return self._pending

    @property
    def settling(self) -> bool:
        """Whether a job that waits for no sync is not settled yet."""
        return self._early > 0

    def submit(self, job: Job) -> asyncio.Future[Any]:
        self._take(job)
        if self._joining:
            self._hurry()
        self._queue.put(job)
        return job.future

    def join(self, job: Job) -> asyncio.Future[Any]:
        """Submit with the next job, or after `JOIN_SECONDS` without one: a group of its own would cost as much as that one."""
        self._take(job)
        self._joining.append(job)
        if self._timer is None:
            self._timer = self._loop.call_later(JOIN_SECONDS, self._hurry)
        return job.future

    def _take(self, job: Job) -> None:
        if self.closed:
            raise InternalError("the writer is closed")
        job.future = self._loop.create_future()
        self._pending += job.size
        self._early += not job.durable

    def _hurry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for job in self._joining:
            self._queue.put(job)
        self._joining.clear()

    async def room(self) -> None:
        """Wait while `QUEUE_BYTES` or more are pending."""
        while self._pending >= QUEUE_BYTES:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            await turn

    async def close(self) -> None:
        """Carry out what was submitted and end the thread. Safe twice."""
        if not self.closed:
            self._hurry()
            self.closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        while jobs := self._gather():
            try:
                self._commit(jobs, self._acknowledge)
            except Exception as error:  # noqa: BLE001 - the waiting callers get it; the thread must not die under the others
                self._fail(jobs, error)

    def _gather(self) -> list[Job]:
        """Wait for a job; take with it what else is there. Empty at the end."""
        first = self._queue.get()
        if first is None:
            return []
        jobs, size = [first], first.size
        while len(jobs) < GROUP_JOBS and size < GROUP_BYTES:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._queue.put(None)
                break
            jobs.append(job)
            size += job.size
        return jobs

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        left = [job for job in jobs if not job.acknowledged]
        for job in left:
            job.error = error
        self._acknowledge(left, None)

    def _acknowledge(self, jobs: Sequence[Job], published: Any) -> None:
        for job in jobs:
            job.acknowledged = True
        try:
            self._loop.call_soon_threadsafe(self._settle, jobs, published)
        except RuntimeError:  # the loop was closed without close(): nobody waits any more
            self.closed = True

    def _settle(self, jobs: Sequence[Job], published: Any) -> None:
        if published:
            self._published(published)
        for job in jobs:
            self._pending -= job.size
            self._early -= not job.durable
            job.settle()
        if self._waiting and self._pending < QUEUE_BYTES:
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                _resolve(turn, None)


def by_need(jobs: list[Job]) -> tuple[list[Job], list[Job]]:
    """Those that may be acknowledged before the sync, and those after it. Ordered ones do not overtake each other."""
    early: list[Job] = []
    late: list[Job] = []
    held: set[str] = set()
    for job in jobs:
        if job.durable and job.ordered:
            held.add(job.ordered)
        (late if job.durable or (job.ordered and job.ordered in held) else early).append(job)
    return early, late


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
