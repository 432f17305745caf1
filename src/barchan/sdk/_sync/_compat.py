"""What `sdk/_compat.py` is for the asynchronous client, with threads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from barchan.errors import InvalidRequest, RequestTimeout
from barchan.sdk._sync import _futures
from barchan.sdk._sync._futures import Expired, Future, TaskCancelled, here, start, with_baton, without_baton

T = TypeVar("T")
Task = _futures.Task
Cancelled = (KeyboardInterrupt, TaskCancelled, Expired)
monotonic = time.monotonic
in_thread = without_baton
_END = object()


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Future[None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)

    def wait(self) -> None:
        if not self._set:
            future: Future[None] = Future()
            self._waiting.append(future)
            future.wait()


class Lock:
    """Its holder may wait. Those who want it get it in the order in which they came."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> None:
        if self._held:
            turn: Future[None] = Future()
            self._waiting.append(turn)
            try:
                turn.wait()
            except BaseException:
                if turn.done():
                    self.__exit__()
                else:
                    self._waiting.remove(turn)
                raise
        self._held = True

    def __exit__(self, *exc: object) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._held = False


def exclusive(cls: type[T]) -> type[T]:
    """Public methods take the baton, and generators at each of their steps."""
    for name, method in tuple(vars(cls).items()):
        if inspect.isfunction(method) and (name in _SPECIAL or not name.startswith("_")):
            setattr(cls, name, _stepping(method) if inspect.isgeneratorfunction(method) else _taking(method))
    if hasattr(cls, "__enter__"):
        cls.__aenter__, cls.__aexit__ = _needs_no_async, _needs_no_async  # type: ignore[attr-defined]
    return cls


def _needs_no_async(self: object, *exc: object) -> None:
    kind = type(self).__name__
    raise TypeError(f"{kind} needs `with`; `from barchan import Client` is the one for `async with`")


_SPECIAL = ("__enter__", "__exit__", "__iter__", "__next__")


def _taking(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def taking(*args: Any, **options: Any) -> T:
        return with_baton(method, *args, **options)

    return taking


def _stepping(method: Callable[..., Generator[T, None, None]]) -> Callable[..., Iterator[T]]:
    @functools.wraps(method)
    def stepping(*args: Any, **options: Any) -> Iterator[T]:
        steps = method(*args, **options)
        try:
            while (item := with_baton(next, steps, _END)) is not _END:
                yield item
        finally:
            with_baton(steps.close)

    return stepping


def free(work: Callable[..., T]) -> Callable[..., T]:
    """A function of the caller's, which may take its time or use the SDK: without the baton."""
    return functools.partial(without_baton, work)


def source(pieces: Iterable[T]) -> Iterator[T]:
    """As `free`."""
    steps = iter(pieces)
    while (item := without_baton(next, steps, _END)) is not _END:
        yield item


def spawn(keep: set[Task[Any]], work: Callable[..., T], *args: Any) -> Task[T]:
    """Run beside the caller, in a thread. `keep` holds the task while it runs; a failure nobody waits for stays silent."""
    task = start(work, *args)
    keep.add(task)
    task.add_done_callback(keep.discard)
    return task


def joined(task: Task[T]) -> T:
    """The task's result."""
    return task.wait()


def ended(tasks: AbstractSet[Future[Any]], seconds: float) -> None:
    """Wait until all ended; cancel those that take longer. One that is in code of the caller's is not waited for for ever."""
    waited = _all_done(set(tasks), seconds)
    for late in waited:
        late.cancel()
    _all_done(waited, seconds)


def _all_done(tasks: AbstractSet[Future[Any]], seconds: float) -> AbstractSet[Future[Any]]:
    """Returns those that are not."""
    until = monotonic() + seconds
    return {task for task in tasks if not task.done_by(until)}


def sleep(seconds: float) -> None:
    waiter = threading.Lock()
    waiter.acquire()
    _futures.block(waiter, monotonic() + seconds)


@contextlib.contextmanager
def within(seconds: float | None, what: str) -> Iterator[None]:
    """`RequestTimeout` when a wait in the block takes longer."""
    if seconds is not None and not isinstance(seconds, (int, float)):
        raise InvalidRequest(f"timeout: {seconds!r} is no number", field="timeout", hint="seconds, or None")
    outer = here.until
    mine = None if seconds is None else monotonic() + seconds
    here.until = min((at for at in (outer, mine) if at is not None), default=None)
    try:
        yield
    except Expired as error:
        if error.until != mine:
            raise
        raise RequestTimeout(f"{what}: no answer in {seconds:g} s") from error
    finally:
        here.until = outer
