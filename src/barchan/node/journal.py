"""How the recorder's jobs become records of the log: staged in the order of their submission, written, synced, acknowledged.

A thread takes whole groups: one write and, if anybody in the group waits for it, one sync. A small job that needs no
sync is done at once on the event loop when nothing waits before it, which spares two changes of thread: its write goes to
the page cache. When such a write was slow, the host's disk is behind its page cache, and for a while all go to the thread.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from barchan.errors import BarchanError, NodeStorageFull
from barchan.node.writer import Acknowledge, Job, Writer, by_need
from barchan.trajectory.index import Change, Index
from barchan.trajectory.log import Log
from barchan.trajectory.record import Body, Kind, Position, Record

SMALL = 512 << 10
"""Bytes that may be written on the event loop: copying them to another thread's core would cost as much."""
SLOW_SECONDS, CALM_SECONDS = 0.01, 10.0
"""A write that blocks for longer, and for how long none is made on the event loop after one."""


class LogLimits(NamedTuple):
    """Bytes of all segments."""

    kept: int
    """Beyond this those that no live sandbox needs are removed."""
    most: int
    """Beyond this, with those that are needed, nothing new begins."""


News = tuple[list[Change], list[str]]
"""Changed commands and forgotten sandboxes, for whoever answers questions on the loop."""


class Journal:
    """`submit`, `room`, `pending` and `close` belong to the event loop; jobs' `run` may call `put` and nothing else here."""

    def __init__(self, log: Log, index: Index, limits: LogLimits, published: Callable[[News], None]) -> None:
        self.log = log
        self.index = index
        self.over = False
        """The log is as long as it may get, so nothing new should begin. For jobs' `run`."""
        self._limits = limits
        self._segment = log.segments()[-1].number
        self._forgotten: list[str] = []
        self._published = published
        self._lock = threading.Lock()
        """Of the log's tail and the index."""
        self._queued = 0
        self._taken = 0
        self._calm_after = 0.0
        self._retain()
        self._writer = Writer("recorder", self._commit, published)

    @property
    def pending(self) -> int:
        """Bytes submitted and not settled."""
        return self._writer.pending

    async def room(self) -> None:
        """Wait while 64 MiB or more are pending."""
        await self._writer.room()

    async def close(self) -> None:
        """Write and sync what was submitted. Safe twice."""
        await self._writer.close()
        await asyncio.to_thread(self.log.close)

    def submit(self, job: Job) -> asyncio.Future[Any]:
        if not job.durable and job.size <= SMALL and self._at_once(job):
            return job.future
        self._queued += 1
        return self._writer.submit(job)

    def put(self, sandbox: str, kind: Kind, key: str, body: Body, previous: Position | None) -> int:
        """Stage the sandbox's next record. Returns its seq."""
        seq = self.index.sandboxes[sandbox].last_seq + 1
        record = Record(sandbox, seq, kind, key, time.time_ns(), body, previous)
        self.index.apply(self.log.stage(record), record)
        return seq

    def forget(self, sandbox: str) -> None:
        """From a job: once its group is written, the sandbox is out of the index."""
        self._forgotten.append(sandbox)

    # --- on the loop

    def _at_once(self, job: Job) -> bool:
        """Do it here and now, unless that would overtake or could block."""
        if self._writer.closed or time.monotonic() < self._calm_after or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._taken != self._queued or self._writer.settling or self.log.full or self.over:
                return False
            job.future = asyncio.get_running_loop().create_future()
            started, waits = time.monotonic(), _waits()
            try:
                news = self._write([job])
            except Exception as error:  # noqa: BLE001 - as in the thread: it belongs to whoever waits
                job.error, news = error, ([], [])
            if time.monotonic() - started > SLOW_SECONDS and _waits() > waits:
                self._calm_after = time.monotonic() + CALM_SECONDS
        finally:
            self._lock.release()
        if news[0] or news[1]:
            self._published(news)
        job.settle()
        return True

    # --- in the thread

    def _commit(self, jobs: list[Job], acknowledge: Acknowledge) -> None:
        with self._lock:
            try:
                changes, forgotten = self._write(jobs)
            finally:
                self._taken += len(jobs)
            sealed = self.log.segments()[-1].number != self._segment
        early, late = by_need(jobs)
        if not late:
            acknowledge(early, (changes, forgotten))
        else:
            self._sync(early, late, changes, forgotten, acknowledge)
        # Seldom, for nothing should follow telling the loop: as long as this thread runs on, it holds the loop up.
        if sealed or (self.over and forgotten):
            self._retain()

    def _sync(
        self, early: list[Job], late: list[Job], changes: list[Change], forgotten: list[str], acknowledge: Acknowledge
    ) -> None:
        running = [change for change in changes if not change[1].ended]
        if early or running:
            acknowledge(early, (running, []))
        self.log.sync()
        acknowledge(late, ([change for change in changes if change[1].ended], forgotten))

    def _write(self, jobs: list[Job]) -> News:
        """All of them with one write. When the group does not fit on the disk, only those fail that must."""
        self.index.begin()
        try:
            for job in jobs:
                _stage(job)
            self.log.write()
        except BarchanError as error:
            self.index.rollback()
            return self._apart(jobs, error)
        except BaseException:
            self.index.rollback()
            self.log.drop()
            raise
        changes, forgotten = self.index.changes(), self._forgotten
        self._forgotten = []
        for sandbox in forgotten:
            self.index.forget(sandbox)
        return changes, forgotten

    def _apart(self, jobs: list[Job], error: BarchanError) -> News:
        self._forgotten = []
        if len(jobs) == 1 or not isinstance(error, NodeStorageFull):
            for job in jobs:
                job.error = job.error or error
            return [], []
        all_news = [self._write([job]) for job in jobs]
        return [change for news in all_news for change in news[0]], [name for news in all_news for name in news[1]]

    def _retain(self) -> None:
        """A segment was sealed: older ones may have to go. What was written is acknowledged whatever comes of this."""
        with self._lock:
            self._segment = self.log.segments()[-1].number
            self.log.retain(self._limits.kept, self.index.sandboxes.keys())
            self.over = self.log.total > self._limits.most


def _waits() -> int:
    """How often this thread slept, as opposed to having been displaced by others."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _stage(job: Job) -> None:
    job.value = job.error = None
    try:
        job.value = job.run()
    except BarchanError as error:
        job.error = error
