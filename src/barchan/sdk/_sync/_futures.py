"""What the synchronous client waits with, in the place of `wire/futures.py`.

One baton: of all threads, only the one that holds the baton runs code of the SDK, as with an event loop. It is handed on where
the asynchronous code awaits, and only there, so that what is generated from that code needs no locks and cannot lose a
wake-up. What was written to a connection meanwhile is sent before the baton is handed on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_baton = threading.RLock()
held = _baton._is_owned  # type: ignore[attr-defined]  # as `threading.Condition` uses it
unsent: set[Callable[[], None]] = set()
"""What to call before the baton is handed on. Never blocks and never raises an `Exception`."""


class TaskCancelled(BaseException):
    """Raised where a cancelled task waits."""


class Expired(BaseException):
    """Raised where a thread waits beyond the end of a `within`."""

    def __init__(self, until: float) -> None:
        super().__init__("a time limit has passed")
        self.until = until


class _Thread(threading.local):
    """What a thread's waits observe."""

    task: Task[Any] | None = None
    until: float | None = None
    """A point of `time.monotonic()`."""


here = _Thread()


def with_baton(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run code of the SDK."""
    if held():
        return work(*args, **options)
    with _baton:
        try:
            return work(*args, **options)
        finally:
            _send()


def without_baton(work: Callable[..., T], *args: Any) -> T:
    """Run what may take its time. An interrupt may come anywhere, so that what was done is looked at, not remembered."""
    _send()
    try:
        _baton.release()
        return work(*args)
    finally:
        # Here and not in a function of its own, at whose beginning an interrupt could be raised. It is raised behind this.
        interrupt: BaseException | None = None
        while True:
            try:
                if held():
                    break
                _baton.acquire()
            except BaseException as raised:  # noqa: BLE001  raised below
                interrupt = raised
        if interrupt is not None:
            raise interrupt


def _send() -> None:
    while unsent:
        unsent.pop()()


def block(waiter: threading.Lock, until: float | None) -> bool:
    """Wait until somebody releases `waiter`, or until that time. Returns whether it was released.

    Raises `TaskCancelled`, and `Expired` when a time limit of the caller's ends earlier.
    """
    task, limit = here.task, here.until
    if task is not None:
        task.check()
        task.waiter = waiter
    ends = [at for at in (until, limit) if at is not None]
    timeout = max(0.0, min(ends) - time.monotonic()) if ends else -1
    try:
        woken = without_baton(waiter.acquire, True, timeout)
    finally:
        if task is not None:
            task.waiter = None
    if task is not None:
        task.check()
    if not woken and limit is not None and time.monotonic() >= limit:
        raise Expired(limit)
    return woken


def wake(waiter: threading.Lock) -> None:
    if waiter.locked():
        waiter.release()


class Future(Generic[T]):
    """As asyncio's, but that callbacks run at once and threads `wait`."""

    def __init__(self) -> None:
        self._done = False
        self._cancelled = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] = []
        self._waiters: list[threading.Lock] = []

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self._done:
            return False
        self._cancelled = True
        self._finish()
        return True

    def set_result(self, result: T) -> None:
        self._result = result
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def exception(self) -> BaseException | None:
        if self._cancelled:
            raise TaskCancelled
        return self._error

    def result(self) -> T:
        if (error := self.exception()) is not None:
            raise error
        return self._result  # type: ignore[return-value]

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def wait(self) -> T:
        """The result, when there is one."""
        while not self.done_by(None):
            pass
        return self.result()

    def done_by(self, until: float | None) -> bool:
        """Wait no longer than until that time. Returns whether it is done."""
        if self._done:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            block(waiter, until)
        except Expired:
            if not self._done:
                raise
        finally:
            if not self._done:
                self._waiters.remove(waiter)
        return self._done

    def _finish(self) -> None:
        assert not self._done, "done already"
        self._done = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            wake(waiter)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Task(Future[T]):
    """A thread that runs code of the SDK. It ends with the interpreter, whatever it waits for."""

    def __init__(self, work: Callable[..., T], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.waiter: threading.Lock | None = None
        """What it waits for."""
        self._stop = False
        threading.Thread(target=with_baton, args=(self._run, work, args), name="barchan", daemon=True).start()

    def cancel(self) -> bool:
        """Takes effect where it waits, once."""
        if self._done:
            return False
        self._stop = True
        if self.waiter is not None:
            wake(self.waiter)
        return True

    def check(self) -> None:
        if self._stop:
            self._stop = False
            raise TaskCancelled

    def _run(self, work: Callable[..., T], args: tuple[Any, ...]) -> None:
        here.task = self
        try:
            self.check()
            result = work(*args)
        except TaskCancelled:
            super().cancel()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self.set_exception(error)
        else:
            self.set_result(result)


def new_future() -> Future[Any]:
    return Future()


def start(work: Callable[..., T], *args: Any) -> Task[T]:
    return Task(work, args)
