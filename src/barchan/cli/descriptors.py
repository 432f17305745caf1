"""Standard input and output as awaitables.

Their other ends may block for as long as they like, and setting a descriptor to non-blocking would also change it for
whoever shares it with us. So each gets a thread; a daemon thread, because nothing can wake it from a blocked call.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from barchan.cli.output import failure

PIECE = 1 << 16


class _Worker:
    """Runs blocking calls one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, job: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        future = asyncio.get_running_loop().create_future()
        self._jobs.put((future, job))
        return await future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                value, error = job(), None
            except OSError as caught:
                value, error = None, caught
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                future.get_loop().call_soon_threadsafe(_settle, future, value, error)


def _settle(future: asyncio.Future[Any], value: Any, error: OSError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


class Input:
    """Reads a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._worker = _Worker()

    async def read(self) -> bytes:
        """What there is, at most `PIECE` bytes; b"" at the end. Raises `OSError`."""
        data = await self._worker.call(lambda: os.read(self._fd, PIECE))
        assert isinstance(data, bytes)
        return data


class Output:
    """Writes standard output (1) or standard error (2)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._worker = _Worker()

    async def write(self, data: bytes) -> None:
        """Returns when all of it is written. `BrokenPipeError` when nobody reads, otherwise `FileFailure`."""
        try:
            await self._worker.call(lambda: _write_all(self._fd, data))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failure(self._fd, error) from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
