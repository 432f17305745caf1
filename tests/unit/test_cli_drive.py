"""A command's streams and signals, with a scripted command on the other side and real pipes on ours."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from barchan.cli import interrupts as module
from barchan.cli.descriptors import Input, Output
from barchan.cli.drive import Drive
from barchan.cli.interrupts import Interrupts
from barchan.errors import ExecNotFound, FileFailure, SandboxUnavailable
from barchan.spec import ExecId, ExecResult


class Scripted:
    """A command that writes what it is told, and ends when told or cancelled."""

    def __init__(self, *output: bytes) -> None:
        self.output = output
        self.done = asyncio.Event()
        self.got: list[str] = []
        self.news = asyncio.Event()
        self.input = bytearray()
        self.input_closed = asyncio.Event()

    async def stdout(self) -> AsyncIterator[bytes]:
        for data in self.output:
            yield data
        await self.done.wait()

    async def signal(self, number: int) -> None:
        self.got.append(signal.Signals(number).name)
        self.news.set()

    async def cancel(self) -> None:
        self.got.append("cancel")
        self.news.set()
        self.done.set()

    async def wait(self) -> ExecResult:
        await self.done.wait()
        return ExecResult(id=ExecId("e"), outcome="exited", exit_code=0)

    async def write(self, data: bytes) -> None:
        self.input += data

    def close(self) -> None:
        self.input_closed.set()

    async def heard(self, *got: str) -> None:
        async with asyncio.timeout(10):
            while self.got != list(got):
                self.news.clear()
                await self.news.wait()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass


async def test_every_byte_with_a_slow_reader(pipe: tuple[int, int]) -> None:
    read, write = pipe
    pieces = [os.urandom(1 << 18) for _ in range(16)]
    process = Scripted(*pieces)
    process.done.set()
    digest = hashlib.sha256()

    def consume() -> None:
        while data := os.read(read, 1000):
            digest.update(data)

    reader = threading.Thread(target=consume)
    reader.start()
    with Interrupts() as interrupts:
        await Drive(process, interrupts).run(((process.stdout(), Output(write).write),))
    os.close(write)
    await asyncio.to_thread(reader.join)
    assert digest.digest() == hashlib.sha256(b"".join(pieces)).digest()


async def test_a_broken_pipe_cancels_the_command_and_drains_it(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.close(read)
    process = Scripted(*[b"y\n"] * 100)
    with Interrupts() as interrupts:
        drive = Drive(process, interrupts)
        async with asyncio.timeout(10):
            await drive.run(((process.stdout(), Output(write).write),))
    assert isinstance(drive.output_failure, BrokenPipeError)
    assert process.got == ["cancel"]


async def test_an_output_that_is_full_cancels_the_command_and_drains_it() -> None:
    process = Scripted(*[b"y\n"] * 100)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with Interrupts() as interrupts:
            drive = Drive(process, interrupts)
            async with asyncio.timeout(10):
                await drive.run(((process.stdout(), Output(full).write),))
    finally:
        os.close(full)
    assert isinstance(drive.output_failure, FileFailure)
    assert str(drive.output_failure) == f"descriptor {full}: No space left on device"
    assert process.got == ["cancel"]


async def test_input_to_its_end(pipe: tuple[int, int]) -> None:
    read, write = pipe
    data = os.urandom(1 << 20)

    def produce() -> None:
        with open(write, "wb", closefd=False) as file:
            file.write(data)
        os.close(write)

    process = Scripted()
    threading.Thread(target=produce).start()
    with Interrupts() as interrupts:
        running = asyncio.create_task(Drive(process, interrupts).run((), Input(read), process))
        async with asyncio.timeout(10):
            await process.input_closed.wait()
            process.done.set()
            await running
    assert bytes(process.input) == data


async def test_input_that_nobody_sends_does_not_hold_up_the_end(pipe: tuple[int, int]) -> None:
    process = Scripted(b"")
    process.done.set()
    with Interrupts() as interrupts:
        async with asyncio.timeout(10):
            result = await Drive(process, interrupts).run((), Input(pipe[0]), process)
    assert result.exit_code == 0
    assert not process.input_closed.is_set()


async def test_input_that_cannot_be_read_has_ended(tmp_path: os.PathLike[str]) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    process = Scripted()
    try:
        with Interrupts() as interrupts:
            running = asyncio.create_task(Drive(process, interrupts).run((), Input(fd), process))
            async with asyncio.timeout(10):
                await process.input_closed.wait()
                process.done.set()
                await running
    finally:
        os.close(fd)


async def test_a_failing_stream_is_the_callers_error() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise SandboxUnavailable("gone")

    async def drop(data: bytes) -> None:
        pass

    process = Scripted()
    with Interrupts() as interrupts, pytest.raises(SandboxUnavailable):
        async with asyncio.timeout(10):
            await Drive(process, interrupts).run(((broken(), drop), (process.stdout(), drop)))


async def test_first_signal_is_passed_on_second_cancels() -> None:
    process = Scripted()
    with Interrupts() as interrupts:
        interrupts.aim(process)
        os.kill(os.getpid(), signal.SIGINT)
        await process.heard("SIGINT")
        os.kill(os.getpid(), signal.SIGINT)
        await process.heard("SIGINT", "cancel")
    assert interrupts.first == signal.SIGINT


async def test_third_signal_stops_waiting() -> None:
    process = Scripted()

    async def wait() -> None:
        with Interrupts() as interrupts:
            interrupts.aim(process)
            for _ in range(3):
                interrupts.take(signal.SIGINT)
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(wait())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_request_to_end_is_not_ignored_for_ever(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    process = Scripted()
    with Interrupts() as interrupts:
        interrupts.aim(process)
        os.kill(os.getpid(), number)
        await process.heard(number.name, "cancel")


async def test_a_signal_before_there_is_a_command() -> None:
    process = Scripted()
    with Interrupts() as interrupts:
        interrupts.take(signal.SIGINT)
        assert interrupts.first == signal.SIGINT
        interrupts.aim(process)
        await process.heard("SIGINT")


async def test_two_signals_before_there_is_a_command_stop_waiting() -> None:
    async def wait() -> None:
        with Interrupts() as interrupts:
            interrupts.take(signal.SIGTERM)
            interrupts.take(signal.SIGTERM)
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(wait())


async def test_a_signal_for_a_command_that_has_just_ended() -> None:
    class Ended(Scripted):
        async def signal(self, number: int) -> None:
            await super().signal(number)
            raise ExecNotFound("ended")

    process = Ended()
    with Interrupts() as interrupts:
        interrupts.aim(process)
        interrupts.take(signal.SIGINT)
        await process.heard("SIGINT")
