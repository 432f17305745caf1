"""Processes named so that a reused pid is never mistaken for them."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from barchan.kernel.processes import start_time


class ProcessRef(msgspec.Struct, frozen=True):
    """A pid and its start time in clock ticks since boot."""

    pid: int
    started: int


def reference(pid: int) -> ProcessRef:
    return ProcessRef(pid, start_time(pid))


@contextmanager
def _opened(process: ProcessRef) -> Iterator[int | None]:
    """A pidfd of exactly this process, or None when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except (ProcessLookupError, ValueError, OverflowError):
        yield None
        return
    try:
        yield fd if start_time(process.pid) == process.started != 0 else None
    finally:
        os.close(fd)


def is_alive(process: ProcessRef) -> bool:
    with _opened(process) as fd:
        return fd is not None


def send(process: ProcessRef, number: signal.Signals) -> None:
    """Signal it, if it is still there. Unlike `subprocess` and `asyncio`, never takes its exit status away."""
    with _opened(process) as fd, suppress(ProcessLookupError):
        if fd is not None:
            signal.pidfd_send_signal(fd, number)


def end(process: ProcessRef, number: signal.Signals, timeout: float) -> bool:
    """Signal it and wait until it has ended. False when it has not within `timeout` seconds."""
    with _opened(process) as fd:
        if fd is None:
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
