"""The only place of the SDK that touches asyncio itself, so that a synchronous face can be generated from the rest."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from barchan.errors import InvalidRequest, RequestTimeout

T = TypeVar("T")
Future = asyncio.Future
Task = asyncio.Task
Event = asyncio.Event
Lock = asyncio.Lock
Cancelled = asyncio.CancelledError
monotonic = time.monotonic
sleep = asyncio.sleep


def exclusive(cls: type[T]) -> type[T]:
    """What the methods do is not disturbed by other threads, but where they wait. An event loop sees to that anyhow."""
    if hasattr(cls, "__aenter__"):
        cls.__enter__, cls.__exit__ = _needs_async, _needs_async  # type: ignore[attr-defined]
    return cls


def _needs_async(self: object, *exc: object) -> None:
    kind = type(self).__name__
    raise TypeError(f"{kind} needs `async with`; `from barchan.sync import Client` works without")


def free(work: Callable[..., T]) -> Callable[..., T]:
    """A function of the caller's, which may take its time or use the SDK."""
    return work


def source(pieces: AsyncIterable[T]) -> AsyncIterable[T]:
    """As `free`."""
    return pieces


def spawn(keep: set[Task[Any]], work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Task[T]:
    """Run beside the caller. `keep` holds the task while it runs; a failure nobody waits for stays silent."""
    task = asyncio.get_running_loop().create_task(work(*args))
    keep.add(task)
    task.add_done_callback(keep.discard)
    task.add_done_callback(_retrieve)
    return task


def _retrieve(task: Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def joined(task: Task[T]) -> T:
    """The task's result. Being cancelled here does not cancel it."""
    return await asyncio.shield(task)


async def ended(tasks: AbstractSet[Future[Any]], seconds: float) -> None:
    """Wait until all ended; cancel those that take longer."""
    if not tasks:
        return
    _, late = await asyncio.wait(set(tasks), timeout=seconds)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    return await asyncio.to_thread(work, *args)


@contextlib.asynccontextmanager
async def within(seconds: float | None, what: str) -> AsyncIterator[None]:
    """`RequestTimeout` when the block takes longer."""
    if seconds is not None and not isinstance(seconds, (int, float)):
        raise InvalidRequest(f"timeout: {seconds!r} is no number", field="timeout", hint="seconds, or None")
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise RequestTimeout(f"{what}: no answer in {seconds:g} s") from error
