"""One running command with our standard streams and signals attached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from barchan.cli.descriptors import Input
from barchan.cli.interrupts import Interrupts, Target
from barchan.errors import BarchanError, FileFailure
from barchan.spec import ExecResult

Sink = Callable[[bytes], Awaitable[None]]
"""Returns when the bytes are written. `BrokenPipeError` when nobody reads them, `FileFailure` when it cannot."""


class Writable(Protocol):
    async def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


class Running(Target, Protocol):
    """What is needed of the SDK's process handle besides its streams."""

    async def wait(self) -> ExecResult: ...


class Drive:
    """Copies until the command has ended."""

    def __init__(self, process: Running, interrupts: Interrupts) -> None:
        self._process = process
        self._interrupts = interrupts
        self.output_failure: BrokenPipeError | FileFailure | None = None
        """Why output of ours could not be written; the command was cancelled for it."""

    async def run(
        self,
        outputs: tuple[tuple[AsyncIterator[bytes], Sink], ...],
        source: Input | None = None,
        sink: Writable | None = None,
    ) -> ExecResult:
        self._interrupts.aim(self._process)
        feeding = asyncio.create_task(_feed(source, sink)) if source and sink else None
        try:
            await _together(*(self._copy(stream, write) for stream, write in outputs))
            return await self._process.wait()
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    async def _copy(self, stream: AsyncIterator[bytes], write: Sink) -> None:
        """What comes after a failed write is read and dropped, so that the command can end."""
        async for data in stream:
            if self.output_failure is not None:
                continue
            try:
                await write(data)
            except (BrokenPipeError, FileFailure) as error:
                self.output_failure = error
                self._interrupts.cancel()


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """All of them; the first failure ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _feed(source: Input, sink: Writable) -> None:
    """The command may end before it has read everything: that is no error here."""
    with suppress(BarchanError):
        while data := await _read(source):
            await sink.write(data)
        sink.close()


async def _read(source: Input) -> bytes:
    """Input that cannot be read (a directory, a terminal that is gone) is input that has ended."""
    try:
        return await source.read()
    except OSError:
        return b""
