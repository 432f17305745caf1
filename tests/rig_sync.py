"""What `tests/rig.py` is for asynchronous tests, with threads: the server's side runs in an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import pytest

from barchan.sdk._sync import _compat
from barchan.sdk._sync._futures import start, with_baton
from barchan.sync import Client
from tests import rig
from tests.contract import api_site
from tests.contract.faults import Fault

T = TypeVar("T")
Cancelled = _compat.Cancelled
TOKEN = api_site.TOKEN
pause = functools.partial(time.sleep, 0.005)


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="server side", daemon=True).start()
    return made


def served(work: Coroutine[Any, Any, T]) -> T:
    """Run on the server's side."""
    return asyncio.run_coroutine_threadsafe(work, loop()).result(60)


def call(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call on the server's side."""

    async def calling() -> T:
        return work(*args, **options)

    return served(calling())


def unwrapped(value: Any) -> Any:
    return object.__getattribute__(value, "it") if isinstance(value, Remote) else value


class Remote:
    """An object of the server's side: its methods run there."""

    def __init__(self, it: Any) -> None:
        object.__setattr__(self, "it", it)

    def __getattr__(self, name: str) -> Any:
        value = getattr(unwrapped(self), name)
        if inspect.iscoroutinefunction(value):
            return lambda *args, **options: served(value(*args, **options))
        return functools.partial(call, value) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(unwrapped(self), name, unwrapped(value))

    def __enter__(self) -> Self:
        served(unwrapped(self).__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        served(unwrapped(self).__aexit__(*exc))


class Site(Remote):
    def __init__(self, data: Path) -> None:
        super().__init__(api_site.Site(data))

    def node(self, name: str = "n1", **options: Any) -> Remote:
        return Remote(call(unwrapped(self).node, name, **options))

    def client(self, **options: Any) -> Client:
        return Client(data=self.data, **{"reconnect": 10.0, **options})


@contextlib.contextmanager
def site(data: Path, **options: Any) -> Iterator[Site]:
    it = Site(data)
    it.start(**options)
    try:
        yield it
    finally:
        it.stop()


def Event() -> Remote:
    return Remote(asyncio.Event())


def fail(node: Remote, operation: str, fault: Fault, **options: Any) -> None:
    rig.fail(unwrapped(node), operation, fault, **options)


class beside(Generic[T]):
    """A thread that can be cancelled where it waits, as a main thread can be interrupted."""

    def __init__(self, work: Callable[..., T], *args: Any, **options: Any) -> None:
        self._task = start(functools.partial(work, *args, **options))

    def begin(self) -> None:
        """Until it waits for something: calls come in the order in which they are made."""
        while not self._task.done() and self._task.waiter is None:
            pause()

    def wait(self) -> T:
        return with_baton(self._task.wait)

    def cancel(self) -> None:
        with_baton(self._task.cancel)

    def cancelled(self) -> bool:
        return self._task.cancelled()


def together(*works: Callable[[], Any]) -> list[Any]:
    running = []
    for work in works:
        running.append(beside(work))
        running[-1].begin()
    return [one.wait() for one in running]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """A test that hangs is ended by its own time limit."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def aside(work: Callable[..., T], *args: Any) -> T:
    return work(*args)


def settle() -> None:
    served(rig.settle())


def finished(node: Remote, sandbox: str, id_: str) -> Any:
    return served(rig.finished(unwrapped(node), sandbox, id_))


def cut(client: Client) -> None:
    assert client._connection._socket is not None
    client._connection._socket.abort()


def deny_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", denied)


@contextlib.contextmanager
def entered(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    value = served(context.__aenter__())
    try:
        yield value
    finally:
        served(context.__aexit__(None, None, None))


def hanging_up() -> contextlib.AbstractContextManager[int]:
    return entered(rig.hanging_up())
