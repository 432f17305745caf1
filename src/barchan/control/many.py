"""Batches: many sandboxes by one request, handed over one by one.

Each is a create of its own under a key made of the batch's key and its index, so that whoever sends the request again gets
the same sandboxes. What was made belongs to the batch until its caller has taken it; when the batch is left, it goes. A
caller that lost its connection gets some time to come back with the same key.

    batch = batches.open(request)
    try:
        async for created in batch: …  batch.take(n)
    finally:
        batches.leave(batch, lost=…)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

import msgspec

from barchan.control.dispatch import Dispatch
from barchan.control.slots import Line, Slots
from barchan.errors import BarchanError, Conflict, InternalError, NodeUnavailable
from barchan.spec import SandboxInfo
from barchan.wire.messages import CancelMany, Created, CreateMany, CreateSandbox, unpack

logger = logging.getLogger(__name__)
AHEAD = 256
"""Sandboxes that may be on their way or made and not taken: what bounds memory, and what a slow caller leaves lying."""
TRIES = 3
"""Of a create whose node went away, each of which waits for it as long as any request does."""
REMOVAL_TRIES, REMOVAL_PAUSE = 60, 1.0


class Batch:
    """One request being carried out. Iterate over it once: what is ready or has failed, as it comes."""

    def __init__(self, dispatch: Dispatch, slots: Slots, request: CreateMany, *, ahead: int = AHEAD) -> None:
        self.key = request.key
        self.error: BarchanError | None = None
        """Why it ends before everything is made."""
        self._dispatch = dispatch
        self._request = request
        self._line = Line(slots)
        self._began = time.monotonic()
        done = set(request.done)
        self._wanted = [index for index in range(request.count) if index not in done]
        self._room = asyncio.Semaphore(ahead)
        self._ready: deque[Created] = deque()
        self._given: deque[int] = deque()
        self._taken = 0
        self._begun = 0
        self._kept: set[int] = set()
        """Indices of which nothing is to be removed."""
        self._unsure: set[int] = set()
        """Failed with their node away."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._making = self._spawn(self._make_all())

    async def __aiter__(self) -> AsyncIterator[Created]:
        for _ in self._wanted:
            while not self._ready:
                await self._change()
            created = self._ready.popleft()
            self._given.append(created.index)
            yield created

    def take(self, count: int) -> None:
        """The first `count` that were given are the caller's: they stay, and as many more may be made."""
        while self._taken < count and self._given:
            index = self._given.popleft()
            self._taken += 1
            if index not in self._unsure:
                self._kept.add(index)
            self._room.release()
        self._changed.set()

    def release(self) -> None:
        """Let one more be made although nobody has taken what was given."""
        self._room.release()

    async def all_taken(self) -> None:
        while self._taken < len(self._wanted):
            await self._change()

    def fail(self, error: BarchanError) -> None:
        """End it for whoever iterates over it; what was made is not touched."""
        self.error = error
        self._making.cancel()
        self._changed.set()

    async def undo(self) -> None:
        """Make no more, and remove what was not taken. Idempotent."""
        await self.stop()
        await remove_all(self._dispatch, self.key, set(self._wanted[: self._begun]) - self._kept)

    async def stop(self) -> None:
        """Make no more. What a node had begun ends there, too."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _change(self) -> None:
        if self.error is not None:
            raise self.error
        self._changed.clear()
        await self._changed.wait()

    async def _make_all(self) -> None:
        for index in self._wanted:
            await self._room.acquire()
            self._begun += 1
            self._spawn(self._make(index))

    async def _make(self, index: int) -> None:
        queued = 0.0

        def placed() -> None:
            nonlocal queued
            queued = queued or (time.monotonic() - self._began) * 1000

        try:
            info = unpack(await self._tried(self._one(index), placed), SandboxInfo)
            created = Created(index=index, sandbox=msgspec.structs.replace(info, queued_ms=queued), queued_ms=queued)
        except BarchanError as error:
            created = Created(index=index, error=error.body(), queued_ms=queued)
            if isinstance(error, NodeUnavailable):
                self._unsure.add(index)
        except Exception as error:
            logger.exception("create failed")
            created = Created(index=index, error=InternalError(f"unexpected {type(error).__name__}").body())
        self._ready.append(created)
        self._changed.set()

    def _one(self, index: int) -> CreateSandbox:
        return CreateSandbox(spec=self._request.spec, key=key_of(self.key, index))

    async def _tried(self, request: CreateSandbox, placed: Any) -> bytes:
        for _ in range(TRIES - 1):
            try:
                return await self._dispatch.create(request, self._line, placed)
            except NodeUnavailable:
                continue  # it may have been made: the same key finds it
        return await self._dispatch.create(request, self._line, placed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def key_of(batch: str, index: int) -> str:
    return f"{batch}.{index}"


async def remove_all(dispatch: Dispatch, batch: str, indices: Iterable[int]) -> None:
    left = iter(indices)
    while some := tuple(itertools.islice(left, AHEAD)):
        await asyncio.gather(*(remove(dispatch, key_of(batch, index)) for index in some))


async def remove(dispatch: Dispatch, key: str) -> None:
    """What was made with this key, as soon as its node is there."""
    for _ in range(REMOVAL_TRIES):
        try:
            return await dispatch.abandon(key)
        except NodeUnavailable:
            await asyncio.sleep(REMOVAL_PAUSE)
        except BarchanError as error:
            logger.warning("what was made for %s stays until its time is over: %s", key, error)
            return


class Batches:
    """The batches of one API process. `wait`: seconds that a caller with a lost connection has to come back."""

    def __init__(self, dispatch: Dispatch, wait: float) -> None:
        self._dispatch = dispatch
        self._wait = wait
        self._slots = Slots()
        self._open: dict[str, Batch] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def open(self, request: CreateMany) -> Batch:
        """Begin it, or go on with it: the newest call of a key has it, an older one ends with `Conflict`."""
        before = self._open.get(request.key)
        if before is not None:
            before.fail(Conflict("another call with this key goes on with it", field="key"))
        batch = self._open[request.key] = Batch(self._dispatch, self._slots, request)
        return batch

    def leave(self, batch: Batch, *, lost: bool) -> None:
        """Its caller is gone. `lost`: and may come back."""
        if self._open.get(batch.key) is batch:
            self._beside(self._end(batch, self._wait if lost else 0.0))

    async def cancel(self, request: CancelMany) -> None:
        """End the batch of a key, whether it is under way, was left, or was another process's. Returns when all is removed,
        which goes on when nobody waits for it."""
        await asyncio.shield(self._beside(self._cancel(request)))

    async def _cancel(self, request: CancelMany) -> None:
        batch = self._open.pop(request.key, None)
        if batch is not None:
            batch.fail(Conflict("the batch was cancelled", field="key"))
            await batch.stop()
        await remove_all(self._dispatch, request.key, sorted(set(range(request.count)) - set(request.done)))

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end(self, batch: Batch, after: float) -> None:
        if after:
            await asyncio.sleep(after)
        if self._open.get(batch.key) is batch:
            del self._open[batch.key]
            await batch.undo()
